"""Operations that a function dispatches to a device, as far as they launch something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Views and allocations launch nothing.
WITHOUT_LAUNCH = {
    *("view", "_unsafe_view", "slice", "select", "expand", "t", "transpose", "permute", "unsqueeze", "squeeze"),
    *("detach", "alias", "empty", "new_empty", "empty_strided", "new_empty_strided", "as_strided", "split", "unbind"),
    *("lift_fresh", "reshape", "diagonal", "unfold"),
}
SYNCHRONISES = {"_local_scalar_dense", "nonzero", "unique", "_unique2", "item", "_to_copy", "masked_select"}


class LaunchCount(TorchDispatchMode):
    """Counts operations by name; an operation on a device is at least one launch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").partition(".")[0]
        if name not in WITHOUT_LAUNCH:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def count_launches(function: Callable[[], Any]) -> Counter[str]:
    with LaunchCount() as count:
        function()
    return count.counts
