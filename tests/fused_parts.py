"""Fused operations under Triton's interpreter: their results and launches against those of their definitions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ctcdraft.fused import Operation, has_triton

ON_GPU = torch.cuda.is_available()
# Fifty random cases of every check, and with `make test-slow` a thousand.
SEEDS = pytest.mark.parametrize(
    "seeds",
    [
        *(range(first, first + 10) for first in range(0, 50, 10)),
        *(pytest.param(range(first, first + 100), marks=pytest.mark.slow) for first in range(1000, 2000, 100)),
    ],
    ids=lambda seeds: str(seeds[0]),
)


def random_integer(rng: torch.Generator, low: int, high: int) -> int:
    """Return an integer from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=rng))


def why_not_interpreted() -> str | None:
    """Return why kernels cannot be interpreted and counted here; None where they can."""
    if not has_triton() or os.environ.get("TRITON_INTERPRET") != "1":
        return "no triton here, or a GPU, where its kernels are not interpreted"
    if tuple(map(int, (number := import_module("triton").__version__).split(".")[:2])) < (3, 7):
        return f"triton {number} does not interpret with the numpy of today; 3.7 does"
    try:
        import_module("triton.runtime.interpreter").GridExecutor  # noqa: B018
        import_module("torch.utils._python_dispatch")._disable_current_modes  # noqa: B018
    except (ImportError, AttributeError) as error:  # private names
        return f"kernels cannot be counted with this torch or triton: {error}"
    return None


def replace_language_once() -> None:
    """Let the interpreter replace the functions of triton.language at the first kernel only.

    It does so at every call of a kernel or of a function in one, by the same functions: half of the time of a kernel.
    Nothing else in this process uses triton.language, so that it is not restored.
    """
    interpreter = import_module("triton.runtime.interpreter")
    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope")):
        return  # private names of triton 3.9; without them kernels are only slower
    replace, replaced = interpreter._patch_lang, set()

    def replace_once(function: Callable) -> Any:
        modules = frozenset(value for value in function.__globals__.values() if value is language or value is core)
        if modules not in replaced:
            replaced.add(modules)
            replace(function)
        return interpreter._LangPatchScope()  # what a kernel restores at its end: nothing

    language, core = interpreter.tl, interpreter.tl.core
    interpreter._patch_lang = replace_once


if why_not_interpreted() is None:
    replace_language_once()
needs_triton = pytest.mark.skipif(why_not_interpreted() is not None, reason=str(why_not_interpreted()))
# For `check_operation`, which compiles the kernels where there is a GPU.
runs_kernels = pytest.mark.gpu if ON_GPU else needs_triton


# Views and allocations launch nothing.
WITHOUT_LAUNCH = {
    *("view", "_unsafe_view", "slice", "select", "expand", "t", "transpose", "permute", "unsqueeze", "squeeze"),
    *("detach", "alias", "empty", "new_empty", "empty_strided", "new_empty_strided", "as_strided", "split", "unbind"),
    *("lift_fresh", "reshape", "diagonal", "unfold"),
}


class LaunchCount(TorchDispatchMode):
    """Counts operations; one on a device is at least one launch."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += function.name().removeprefix("aten::").partition(".")[0] not in WITHOUT_LAUNCH
        return function(*args, **(kwargs or {}))


def count_launches(function: Callable[[], Any]) -> int:
    with LaunchCount() as count:
        function()
    return count.total


def count_kernels(function: Callable[[], Any]) -> int:
    """Return the launches of a function: interpreted kernels, and operations of torch."""
    from torch.utils._python_dispatch import _disable_current_modes
    from triton.runtime.interpreter import GridExecutor

    kernels, run = [], GridExecutor.__call__

    def counted(self: Any, *args: Any, **options: Any) -> None:
        kernels.append(self)
        with _disable_current_modes():  # what the interpreter asks of torch
            run(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch, LaunchCount() as count:
        patch.setattr(GridExecutor, "__call__", counted)
        function()
    return len(kernels) + count.total


def copies(args: Sequence[Any], device: str) -> list[Any]:
    """Return copies of an operation's arguments, with the same strides."""

    def copy(one: torch.Tensor) -> torch.Tensor:
        if 0 in one.stride():  # expanded: several elements in one place, which cannot be copied to
            return one.clone().to(device)
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device).copy_(one)

    return [copy(one) if isinstance(one, torch.Tensor) else one for one in args]


@torch.inference_mode()
def check_operation(operation: Operation, *args: Any, compare: Callable[[Any, Any], None] | None = None) -> Any:
    """Assert that kernels return and write what the definition does on the CPU, with as many launches as registered."""
    expected_args, found_args, found = copies(args, "cpu"), copies(args, "cuda" if ON_GPU else "cpu"), []
    expected = operation(*expected_args)
    if ON_GPU:
        found.append(operation.launch(*found_args))
    else:
        launches = count_kernels(lambda: found.append(operation.launch(*found_args)))
        assert launches == operation.launches, f"{launches} launches of {operation.definition.__name__}"
    compare = compare or assert_equal
    compare(copies(list_of(found[0]), "cpu"), list_of(expected))
    compare(copies(found_args, "cpu"), expected_args)
    return expected


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(list_of(found), list_of(expected), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(list_of(found), list_of(expected), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def list_of(results: Any) -> list[Any]:
    return [results] if isinstance(results, torch.Tensor) or results is None else list(results)
