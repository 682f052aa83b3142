"""Quoting of paths on the command line for Hydra's override grammar.

After `key=` a shell does not expand `~`, and Hydra refuses `=`, quotes, brackets and non-ASCII letters in an unquoted
value, reads 2024 as a number and a comma as a sweep. So for keys that take a path the value is quoted, and its `~`
expanded, before Hydra sees it; with -m a comma separates the paths of a sweep. An ambiguous argument is refused with
the corrected command.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from ctcdraft.errors import InputError
from ctcdraft.renamed import current_argument

PATH_KEYS = {  # last part of a key: base.path, drafter.path, corpus.parts.gsm8k.path, ...
    "run", "prepared", "resume", "out", "checkpoint", "path", "recorded", "baseline", "data", "config", "assistant",
    "chat_template_file", "adapter", "adapted", "offload_folder",
}  # fmt: skip
PATH_LIST_KEYS = {"contestants", "reports"}
BENCHMARK_PREFIX = "corpus.leakage.benchmarks."  # every key below it names a file
MULTIRUN_FLAGS = {"-m", "--multirun"}
UNQUOTED_PATTERN = re.compile(r"[\w/\-\\+.$%*@?| ]*", re.ASCII)  # unquoted items that Hydra accepts in a list
ITEM_PATTERN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}|[^\[\]{}(),:'"]+""")


def quote_paths(arguments: Sequence[str], searched: bool = False) -> list[str]:
    """Return the arguments with every path quoted for Hydra: run=~/a,b becomes run='/home/me/a,b'.

    Raises InputError, with the corrected command, for an argument with two readings or none.

    Args:
        searched: the arguments are those of sweep.py, where a comma separates the values of a search except in run=.
    """
    sweeps = searched or not MULTIRUN_FLAGS.isdisjoint(arguments)
    arguments = [current_argument(argument) for argument in arguments]
    for index, argument in enumerate(arguments):
        refuse_split_path(arguments, index)
        if sweeps and "," in argument and not (searched and argument.startswith("run=")):
            arguments[index] = quote_items(argument)
        else:
            refuse_ambiguous_comma(arguments, index)
            arguments[index] = quote_path(argument)
        refuse_unquoted(arguments, index)
    return arguments


def takes_path(argument: str) -> bool:
    """Return whether an argument is key=value and its key takes a path or a list of paths."""
    key, equals, _ = argument.partition("=")
    named = key.rpartition(".")[2].lstrip("+") in PATH_KEYS | PATH_LIST_KEYS
    return bool(equals) and (named or BENCHMARK_PREFIX in key)


def quote_path(argument: str) -> str:
    """Return an argument whose value is one path, quoted where Hydra would parse it as something else."""
    key, _, value = argument.partition("=")
    if not takes_path(argument):
        return argument
    if value.startswith(("[", "{")):
        return quote_items(argument)
    override = parse_override(argument)
    if override is not None:
        if (override.is_sweep_override() and not override._value.simple_form) or override.value() is None:
            return argument  # choice(..) and null
        if isinstance(override.value(), str):
            value = override.value()  # without the quotes that the user gave; 2024 and 1e3 stay as typed
    expanded = os.path.expanduser(value)
    unchanged = override is not None and override.value() == expanded
    return argument if unchanged else f"{key}={hydra_quote(expanded)}"


def quote_items(argument: str) -> str:
    """Return an argument whose value is a list, a mapping or a sweep, with each path in it quoted for Hydra."""
    key, _, value = argument.partition("=")
    return f"{key}={ITEM_PATTERN.sub(quote_item, value)}" if takes_path(argument) else argument


def quote_item(match: re.Match[str]) -> str:
    item = match[0].strip()
    if item.startswith(("'", '"')):
        override = parse_override(f"key={item}")
        text = "" if override is None else override.value()
        return hydra_quote(os.path.expanduser(text)) if text.startswith("~") else match[0]
    expanded = os.path.expanduser(item)
    if not UNQUOTED_PATTERN.fullmatch(expanded) and not item.startswith("${"):
        return hydra_quote(expanded)
    return expanded if item.startswith("~") else match[0]


def refuse_split_path(arguments: Sequence[str], index: int) -> None:
    """Raise InputError for the rest of a path that the shell split at a space: run=my folder."""
    before = arguments[index - 1] if index else ""
    # An argument that begins with ~ deletes a key.
    rest = list(takewhile(lambda text: "=" not in text and not text.startswith(("-", "~")), arguments[index:]))
    if rest and takes_path(before):
        command = corrected(arguments, index - 1, " ".join([before, *rest]), 1 + len(rest))
        key = before.partition("=")[0]
        raise InputError(f"{rest[0]} is not key=value; if it belongs to {key}=, quote them together: {command}")


def refuse_ambiguous_comma(arguments: Sequence[str], index: int) -> None:
    """Raise InputError where a comma may separate existing paths or be a part of one path."""
    key, _, value = arguments[index].partition("=")
    paths = re.split(r"\s*(?<!\\),\s*", value)
    if not takes_path(arguments[index]) or len(paths) < 2 or value.startswith(("[", "{", "'", '"')) or "(" in value:
        return
    as_list = corrected(arguments, index, f"{key}=[{value}]")
    if key.rpartition(".")[2].lstrip("+") in PATH_LIST_KEYS:
        raise InputError(f"{key}= takes several paths as a list in brackets: {as_list}")
    # What exists decides: a path may contain a comma, and only existing paths can be meant together.
    one_exists, *each_exists = (os.path.lexists(os.path.expanduser(path)) for path in (value, *paths))
    if one_exists or not all(each_exists):
        return
    as_one = corrected(arguments, index, f"{key}={hydra_quote(value, double=True)}")
    raise InputError(
        f"{arguments[index]} may be {len(paths)} existing paths or one with the name {value}; for one path: "
        f"{as_one}; for all of them, where {key}= takes a list: {as_list}; -m tries one after the other"
    )


def refuse_unquoted(arguments: Sequence[str], index: int) -> None:
    """Raise InputError for a value that Hydra's grammar accepts only in quotes, with the corrected command."""
    key, equals, value = arguments[index].partition("=")
    if not equals or not re.fullmatch(r"[\w./@+:-]+", key) or value.startswith(("[", "{", "'", '"')):
        return
    quoted = f"{key}={hydra_quote(value, double=True)}"
    if parse_override(arguments[index]) is None and parse_override(quoted) is not None:
        command = corrected(arguments, index, quoted)
        raise InputError(f"{arguments[index]} cannot be read without quotes around its value: {command}")


def parse_override(argument: str) -> Any | None:
    """Return Hydra's Override of an argument, or None where its grammar refuses it."""
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def hydra_quote(text: str, double: bool = False) -> str:
    """Return a text in Hydra's quotes; double ones are easier to read inside the quotes of a shell."""
    return QuotedString(text, Quote.double if double else Quote.single).with_quotes()


def corrected(arguments: Sequence[str], index: int, argument: str, replaced: int = 1) -> str:
    """Return the command of this process for a shell, with another argument in the place of some."""
    changed = [*arguments[:index], argument, *arguments[index + replaced :]]
    return shlex.join(["python", Path(sys.argv[0]).as_posix(), *changed])
