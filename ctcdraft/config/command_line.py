"""Paths on the command line, as arguments that Hydra's grammar takes.

After `key=` a shell expands no `~`, and Hydra refuses `=`, quotes, brackets and letters beyond ASCII in a bare value,
reads 2024 as a number and a comma as a sweep. Of a key that names one path the value is therefore quoted, and its `~`
expanded, before Hydra sees it; with -m a comma separates the paths of a sweep. What cannot be understood is answered
with the command that can.
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

from ctcdraft.errors import InputError
from ctcdraft.renamed import current_argument

PATH_KEYS = {  # by the last part of a key: base.path, drafter.path, corpus.parts.gsm8k.path, ...
    "run", "prepared", "resume", "out", "checkpoint", "path", "recorded", "baseline", "data", "config", "assistant",
    "chat_template_file", "adapter", "adapted", "offload_folder",
}  # fmt: skip
PATH_LIST_KEYS = {"contestants", "reports"}
BENCHMARK_PREFIX = "corpus.leakage.benchmarks."  # every key below it names a file
MULTIRUN_FLAGS = {"-m", "--multirun"}
UNQUOTED_PATTERN = re.compile(r"[\w/\-\\+.$%*@?| ]*", re.ASCII)  # what Hydra takes without quotes within a list
PIECE_PATTERN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}|[^\[\]{}(),:'"]+""")


def quote_paths(arguments: Sequence[str], searched: bool = False) -> list[str]:
    """Return the words with every path as Hydra takes it: run=~/a,b becomes run='/home/me/a,b'.

    searched: a comma separates what sweep.py tries, as it does with -m, but in run=, which is the search's own.
    Raises InputError, with the corrected command, for what has two readings or none.
    """
    arguments, sweeps = (
        [current_argument(argument) for argument in arguments],
        searched or not MULTIRUN_FLAGS.isdisjoint(arguments),
    )
    for place, argument in enumerate(arguments):
        refuse_split_path(arguments, place)
        if sweeps and "," in argument and not (searched and argument.startswith("run=")):
            arguments[place] = quote_pieces(argument)
        else:
            refuse_ambiguous_comma(arguments, place)
            arguments[place] = quote_path(argument)
        refuse_unquoted(arguments, place)
    return arguments


def takes_path(word: str) -> bool:
    """Return whether a word is key=value and its key is known to take a path, or a list of them."""
    key, equals, _ = word.partition("=")
    return bool(equals) and (
        key.rpartition(".")[2].lstrip("+") in PATH_KEYS | PATH_LIST_KEYS or BENCHMARK_PREFIX in key
    )


def quote_path(word: str) -> str:
    """Return a word whose value is one path, quoted where Hydra would take it for something else."""
    key, _, value = word.partition("=")
    if not takes_path(word):
        return word
    if value.startswith(("[", "{")):
        return quote_pieces(word)
    read = parse_override(word)
    if read is not None and ((read.is_sweep_override() and not read._value.simple_form) or read.value() is None):
        return word  # choice(..) and null
    text = read.value() if read is not None and isinstance(read.value(), str) else value
    expanded = os.path.expanduser(text)
    as_typed = read is not None and read.value() == expanded
    return word if as_typed else f"{key}={hydra_quote(expanded)}"


def quote_pieces(word: str) -> str:
    """Return a word whose value is a list, a mapping or a sweep, with each of its paths as Hydra takes it."""
    key, _, value = word.partition("=")
    return f"{key}={PIECE_PATTERN.sub(quote_piece, value)}" if takes_path(word) else word


def quote_piece(found: re.Match[str]) -> str:
    bare = found[0].strip()
    if bare.startswith(("'", '"')):
        read = parse_override(f"key={bare}")
        inner = "" if read is None else read.value()
        return hydra_quote(os.path.expanduser(inner)) if inner.startswith("~") else found[0]
    expanded = os.path.expanduser(bare)
    if not UNQUOTED_PATTERN.fullmatch(expanded) and not bare.startswith("${"):
        return hydra_quote(expanded)
    return expanded if bare.startswith("~") else found[0]


def refuse_split_path(words: Sequence[str], place: int) -> None:
    """Raise InputError for the rest of a path that the shell cut at a space: run=my folder."""
    before = words[place - 1] if place else ""
    rest = list(takewhile(lambda word: "=" not in word and not word.startswith(("-", "~")), words[place:]))
    if not rest or not takes_path(before):
        return
    whole = [*words[: place - 1], " ".join([before, *rest]), *words[place + len(rest) :]]
    raise InputError(
        f"{rest[0]} is no key=value; if it belongs to {before.partition('=')[0]}=, quote them together: "
        f"{shell_command(whole)}"
    )


def refuse_ambiguous_comma(words: Sequence[str], place: int) -> None:
    """Raise InputError where a comma may separate paths as well as belong to one."""
    key, _, value = words[place].partition("=")
    several = re.split(r"\s*(?<!\\),\s*", value)
    if not takes_path(words[place]) or len(several) < 2 or value.startswith(("[", "{", "'", '"')) or "(" in value:
        return
    listed = [*words[:place], f"{key}=[{value}]", *words[place + 1 :]]
    if key.rpartition(".")[2].lstrip("+") in PATH_LIST_KEYS:
        raise InputError(f"{key}= takes several paths as a list in brackets: {shell_command(listed)}")
    whole_there, *each_there = (os.path.lexists(os.path.expanduser(path)) for path in (value, *several))
    if whole_there or not all(each_there):
        return
    one = [*words[:place], f"{key}={hydra_quote(value, double=True)}", *words[place + 1 :]]
    raise InputError(
        f"{words[place]} names {len(several)} paths that are there, and none is called {value}; for one such path: "
        f"{shell_command(one)}; for all of them, where {key}= takes a list: {shell_command(listed)}; -m tries one "
        "after the other"
    )


def refuse_unquoted(words: Sequence[str], place: int) -> None:
    """Raise InputError for a value that Hydra's grammar does not take, with the command in which it is quoted."""
    key, equals, value = words[place].partition("=")
    if not equals or not re.fullmatch(r"[\w./@+:-]+", key) or value.startswith(("[", "{", "'", '"')):
        return
    better = f"{key}={hydra_quote(value, double=True)}"
    if parse_override(words[place]) is None and parse_override(better) is not None:
        corrected = shell_command([*words[:place], better, *words[place + 1 :]])
        raise InputError(f"{words[place]} cannot be read without quotes around its value: {corrected}")


def parse_override(word: str) -> Any | None:
    """Return Hydra's reading of a word, None where it has none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def hydra_quote(text: str, double: bool = False) -> str:
    """Return a text as Hydra reads it back; in double quotes it is easier to read once a shell quotes it, too."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.double if double else Quote.single).with_quotes()


def shell_command(words: Sequence[str]) -> str:
    """Return the command of this process with other words, to be pasted into a shell."""
    return shlex.join(["python", Path(sys.argv[0]).as_posix(), *words])
