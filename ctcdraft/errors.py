"""InputError, the exception for wrong input, and the checks of single values that raise it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import isfinite
from operator import ge, gt, le, lt
from typing import Any


class InputError(ValueError):
    """One sentence: what is wrong, with the values, and what to do about it.

    The entry points print it and exit with status 1, without a traceback. Any other exception is a bug and keeps its
    traceback.
    """


def check_int(value: Any, key: str, least: int = 1, *, null: bool = False) -> Any:
    """Return `value` if it is an integer >= `least`, or None where `null` allows it; raise InputError otherwise.

    Args:
        key: the config key that the sentence names, such as drafter.frames.
    """
    if value is None and null:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{key} must be an integer >= {least}{' or null' * null}, got {value}")
    return value


def check_float(
    value: Any, key: str, *, above: float | None = None, least: float | None = None, below: float | None = None,
    most: float | None = None, null: bool = False,
) -> Any:  # fmt: skip
    """Return `value` if it is a finite number within the bounds, or None where `null` allows it.

    Raises InputError otherwise, such as "decoding.top_p must be a number > 0 and <= 1, got 2".
    """
    if value is None and null:
        return value
    number = not isinstance(value, bool) and isinstance(value, int | float) and isfinite(value)
    bounds = [(">", gt, above), (">=", ge, least), ("<", lt, below), ("<=", le, most)]
    if not number or not all(within(value, bound) for _, within, bound in bounds if bound is not None):
        given = " and ".join(f"{sign} {bound}" for sign, _, bound in bounds if bound is not None)
        raise InputError(f"{key} must be a number{given and f' {given}'}{' or null' * null}, got {value}")
    return value


def check_temperature(value: Any, key: str) -> float:
    """Return a temperature: 0, or one that logits can be divided by without overflow."""
    temperature = check_float(value, key, least=0)
    if 0 < temperature < 1e-6:
        raise InputError(f"{key} must be 0 or at least 1e-6, got {value}")
    return temperature


def unsafe_pickle_error(location: str, key: str) -> InputError:
    """Return the error for a .bin file that torch refuses to unpickle."""
    # torch's own message advises weights_only=False, which runs whatever code the file contains.
    return InputError(
        f"{location} holds weights pickled with other objects, which could run code and are not loaded; give {key}= a "
        "place with .safetensors files"
    )


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def run_cli(name: str, main: Callable[[list[str]], object]) -> None:
    """Run a small command with the command-line arguments; print an InputError and exit with status 1."""
    try:
        main(sys.argv[1:])
    except InputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
