"""The one exception that means "the input was wrong", and its two commonest reasons. It knows no keys of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import isfinite
from typing import Any


class InputError(ValueError):
    """One sentence: what was found, with its values, and what to do about it.

    The entry points print it and exit with status 1, without a traceback. Any other exception is a bug of
    ours and keeps its traceback.
    """


def check_int(value: Any, key: str, least: int = 1) -> int:
    """`value`, if it is a whole number from `least`; key: what the user types, as in drafter.frames."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{key}={value} is impossible; it is a whole number from {least}")
    return value


def check_float(value: Any, key: str) -> float:
    """`value`, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InputError(f"{key}={value} is no number; give one such as {key}=0.5")
    return value


def unsafe_pickle_error(location: str, key: str) -> InputError:
    """Return the error for a .bin file that torch refuses to unpickle; torch itself advises weights_only=False."""
    return InputError(
        f"{location} holds weights pickled with other objects, which could run code and are not loaded; give {key}= a "
        "place with .safetensors files"
    )


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def run_cli(name: str, main: Callable[[list[str]], object]) -> None:
    """Run a small command on its words; what is wrong with them is one sentence and exit status 1."""
    try:
        main(sys.argv[1:])
    except InputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
