"""The prepared corpus: made once, resumed after a kill, refused by another base. It knows no training.

Every batch of answers becomes one part file, whole or not there at all, and batches depend on the prompts
alone. So running again goes on where it was, and the parts come out equal whether it was stopped or not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ctcdraft.base import BaseLM
from ctcdraft.corpus import parts
from ctcdraft.corpus.answers import Answers, Question, questions
from ctcdraft.corpus.chat import answer_text, messages, prompt_tokens
from ctcdraft.corpus.conversations import Corpus
from ctcdraft.corpus.parts import Line, Manifest, checksum
from ctcdraft.errors import InputError

SAME_BASE = ("weights", "tokenizer", "chat_template")  # one base may go by two names


@dataclass(frozen=True)
class Row:
    """One answer after its prompt; the mask is true on the answer, its end token included."""

    id: str
    turn: int
    category: str
    tokens_L: Tensor  # int32, to keep a corpus of a hundred million tokens in memory
    mask_L: Tensor
    ended: bool


@dataclass(frozen=True)
class Prepared:
    """A whole corpus, checked; `manifest["hash"]` stands for its content."""

    manifest: Manifest
    rows: list[Row]


def plan(base: BaseLM, corpus: Corpus, answers: Answers, out: Path) -> str:
    """What `prepare` is about to do, in sentences; prompt tokens are estimated from up to 200 first turns."""
    prompts = corpus.prompts
    turns = sum(len(prompt.turns) for prompt in prompts)
    sample = prompts[:: -(-len(prompts) // 200)]
    tokens = sum(len(prompt_tokens(base.tokenizer, messages(prompt.turns, []))) for prompt in sample)
    asked, said = tokens * turns // len(sample), turns * answers.max_new_tokens
    done = len(parts.part_files(out))
    return (
        f"{corpus.summary()}\n"
        f"{base.name} ({dtype(base)}, {base.device}) answers {len(prompts):,} prompts, {turns:,} turns\n"
        f"about {asked:,} tokens of prompts, at most {said:,} of answers ({answers.max_new_tokens:,} each)\n"
        # As JSON a token takes about 5 bytes, and 2 for its mask.
        f"at most {(asked + said) * 7 / 1e6:,.1f} MB into {out}"
        + (f", where {done:,} batches are finished already" if done else "")
    )


def prepare(base: BaseLM, corpus: Corpus, answers: Answers, out: Path, settings: dict[str, Any]) -> Manifest:
    """Ask the base every turn of every prompt and keep its answers in `out`; run again, it goes on.

    `settings` is written down for the reader. What must agree in order to go on is the base, the prompts
    themselves and how answers are made. Turn k of all prompts comes after turn k - 1 of all, because it
    is asked with the base's own earlier answers.
    """
    prompts = corpus.prompts
    manifest = begin(base, corpus, answers, out, settings)
    known: dict[str, str] = manifest.get("parts", {})
    made: dict[str, str] = {}
    said: dict[str, list[str]] = {prompt.id: [] for prompt in prompts}
    counts = Counter(prompts=len(prompts))
    turns = [len(prompt.turns) for prompt in prompts]
    # smoothing=0 is answers/s over the whole run: the longest come first, so it only gets faster.
    with tqdm(total=sum(turns), unit=" answers", desc="answering", smoothing=0) as bar:
        for turn in range(max(turns)):
            for batch in batches(questions(base, prompts, said, turn), answers.batch_size):
                file = parts.part(out, len(made))
                lines = parts.finished(file, batch, known.get(file.name))
                if lines is None:
                    lines = answered(base, batch, answers)
                    parts.write_part(file, lines)
                else:
                    bar.initial += len(batch)  # answers/s is about this run
                made[file.name] = checksum(file)
                for question, line in zip(batch, lines, strict=True):
                    reply = line["tokens"][len(question.tokens) :]
                    said[question.id].append(answer_text(base.tokenizer, reply, base.stop_tokens))
                    counts.update(tally(question, line))
                bar.update(len(batch))
    return complete(out, manifest, made, counts)


def batches(asked: list[Question], size: int) -> list[list[Question]]:
    return [asked[start : start + size] for start in range(0, len(asked), size)]


def answered(base: BaseLM, batch: Sequence[Question], answers: Answers) -> list[Line]:
    replies = answers(base, [list(question.tokens) for question in batch])
    return [
        {
            "id": question.id,
            "turn": question.turn,
            "category": question.category,
            "tokens": [*question.tokens, *reply],
            "mask": [0] * len(question.tokens) + [1] * len(reply),
            "ended": reply[-1] in base.stop_tokens,
        }
        for question, reply in zip(batch, replies, strict=True)
    ]


def tally(question: Question, line: Line) -> dict[str, int]:
    return {
        "answers": 1,
        "tokens": len(line["tokens"]),
        "answer_tokens": sum(line["mask"]),
        "ended": int(line["ended"]),
        "cut_prompts": int(question.cut > 0),
    }


def begin(base: BaseLM, corpus: Corpus, answers: Answers, out: Path, settings: dict[str, Any]) -> Manifest:
    """The manifest of the corpus in `out`, begun now or earlier; refuses one that was made otherwise."""
    wanted: Manifest = {
        "complete": False,
        "base": base.fingerprint(),
        "prompts": corpus.hash,
        "conversations": corpus.account,
        "answers": {"by": type(answers).__name__, "dtype": dtype(base), **vars(answers)},
        "settings": settings,
    }
    there = parts.read_manifest(out)
    if there is None:
        if parts.part_files(out):
            raise InputError(f"{out} holds parts without manifest.json; choose another out= or add overwrite=true")
        parts.write_manifest(out, wanted)
        return wanted
    refuse_other_base(there, wanted["base"], out)
    changes = [
        f"{key} {there['answers'].get(key)} (now {value})"
        for key, value in wanted["answers"].items()
        if there["answers"].get(key) != value
    ] + (["other prompts"] if there["prompts"] != wanted["prompts"] else [])
    if changes:
        raise InputError(
            f"{out} holds a corpus that was made with {', '.join(changes)}; "
            "repeat those settings, choose another place (out= of data/prepare.py, prepared= of train.py), or have "
            "data/prepare.py replace it with overwrite=true"
        )
    return there


def complete(out: Path, manifest: Manifest, made: dict[str, str], counts: Counter[str]) -> Manifest:
    whole = manifest | {
        "complete": True,
        "counts": {**counts, "ended_share": counts["ended"] / counts["answers"]},
        "hash": hashlib.sha256("".join(made.values()).encode()).hexdigest()[:16],
        "parts": made,
    }
    parts.write_manifest(out, whole)
    return whole


def is_complete(path: Path) -> bool:
    """Whether `path` holds a corpus that was prepared to its end; `read` checks that it is still whole."""
    manifest = parts.read_manifest(path)
    return manifest is not None and manifest["complete"]


def read(path: Path, fingerprint: dict[str, Any]) -> Prepared:
    """The whole corpus, or one sentence on why not: absent, incomplete, damaged, or made for another base."""
    manifest = parts.read_manifest(path)
    if manifest is None:
        raise InputError(f"no prepared corpus at {path}; make one with data/prepare.py out={path}")
    if not manifest["complete"]:
        raise InputError(f"the corpus at {path} is not complete; run data/prepare.py again, it goes on")
    refuse_other_base(manifest, fingerprint, path)
    rows = []
    for name, expected in manifest["parts"].items():
        lines = parts.read_part(path / name)
        if lines is None or checksum(path / name) != expected:
            raise InputError(f"{path / name} is missing or damaged; run data/prepare.py again to redo it")
        rows += [row(line) for line in lines]
    return Prepared(manifest, rows)


def row(line: Line) -> Row:
    tokens_L = torch.tensor(line["tokens"], dtype=torch.int32)
    mask_L = torch.tensor(line["mask"], dtype=torch.bool)
    return Row(line["id"], line["turn"], line["category"], tokens_L, mask_L, line["ended"])


def refuse_other_base(manifest: Manifest, fingerprint: dict[str, Any], path: Path) -> None:
    there = manifest["base"]
    differing = [key.replace("_", " ") for key in SAME_BASE if there[key] != fingerprint[key]]
    if differing:
        raise InputError(
            f"the corpus at {path} holds answers of {there['base']}, but this run's base is "
            f"{fingerprint['base']} (another {', '.join(differing)}); run data/prepare.py for this base with "
            "another out=, or with overwrite=true to replace them"
        )


def dtype(base: BaseLM) -> str:
    return str(base.dtype).removeprefix("torch.")
