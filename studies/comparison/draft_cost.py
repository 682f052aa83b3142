"""What drafts cost where the clock is too unsteady to tell: operations, and bytes of matrix products. It knows no clock
and compares nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ctcdraft.decoding.loop import Context


class CountedDrafter:
    """A drafter whose drafts are counted. total: operations, and bytes of products."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.total, self.drafts = drafter, np.zeros(2), 0

    def draft(self, context: Context, memory: Any, rng: torch.Generator) -> Any:
        with FlopCounterMode(display=False) as counter, MatmulTraffic() as traffic:
            made = self.drafter.draft(context, memory, rng)
        self.total += [counter.get_total_flops(), traffic.bytes]
        self.drafts += 1
        return made


def geometric_mean(work: Any) -> float:
    """The geometric mean of operations and bytes."""
    return float(np.clip(work, 1, None).prod() ** 0.5)


class MatmulTraffic(TorchDispatchMode):
    """Bytes that matrix products read and write."""

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.PRODUCTS:
            self.bytes += sum(one.nbytes for one in (*args, made) if isinstance(one, torch.Tensor))
        return made
