"""How fast a machine that is not here is taken to be. Every number is the user's; none is made up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from ctcdraft.errors import InputError, number

UNKNOWN = (
    "not known without a rate: plan.flops= is operations a second that are really reached (a card's figure times the "
    "share of it that is used), plan.bandwidth= bytes a second of its memory"
)


@dataclass(frozen=True)
class Rate:
    """flops: operations a second; bandwidth: bytes a second. None: not said."""

    flops: float | None
    bandwidth: float | None

    @classmethod
    def of(cls, values: Any) -> Self:
        """The values of plan.flops= and plan.bandwidth=."""
        for key in ("flops", "bandwidth"):
            if values[key] is not None and not number(values[key], f"plan.{key}") > 0:
                raise InputError(f"plan.{key}={values[key]} is no speed; it lies above 0, as in plan.{key}=4e12")
        return cls(values["flops"], values["bandwidth"])

    def seconds(self, flops: float, streamed: float = 0.0) -> float | None:
        """What so many operations take that stream so many bytes meanwhile: the slower of both. None: not known."""
        if self.flops is None:
            return None
        return max(flops / self.flops, streamed / self.bandwidth if self.bandwidth else 0.0)

    def __str__(self) -> str:
        if self.flops is None:
            return "no rate"
        memory = f" and {self.bandwidth:.3g} bytes a second" if self.bandwidth else ", memory taken to keep up"
        return f"at {self.flops:.3g} operations a second{memory}, which is assumed"
