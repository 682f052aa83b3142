"""A run directory is a checkpoint. It knows files and fingerprints; not what a drafter does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctcdraft.drafters.drafter import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.files import write_text, write_whole

MUST_AGREE = ("weights", "width", "vocabulary", "taps", "tokenizer", "chat_template")


@dataclass(frozen=True)
class RunDirectory:
    """config.yaml, fingerprint.json, drafter.safetensors, metrics.jsonl; while training also resume.pt."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def head(self) -> Path:
        return self.path / "drafter.safetensors"

    @property
    def resume(self) -> Path:
        return self.path / "resume.pt"

    @property
    def fingerprint(self) -> Path:
        return self.path / "fingerprint.json"

    def begin(self, config: str, fingerprint: dict[str, Any], overwrite: bool) -> None:
        """Claim the directory for a new run, or refuse because it holds one. Overwriting removes the old run's
        own files and nothing else that may lie there."""
        if self.config.exists():
            if not (overwrite and self.fingerprint.exists()):
                self.refuse_to_overwrite()
            for file in (self.config, self.head, self.resume, self.metrics, self.fingerprint):
                file.unlink(missing_ok=True)
        write_text(self.fingerprint, json.dumps(fingerprint, indent=2) + "\n")
        self.write_config(config)  # last: it is what makes the directory a run

    def write_config(self, config: str) -> None:
        write_text(self.config, config)

    def refuse_to_overwrite(self) -> NoReturn:
        raise InputError(
            f"{self.path} holds a run already; continue it with resume={self.path}, choose another run=, "
            "or throw it away with overwrite=true"
        )

    def require(self) -> None:
        if not self.config.is_file():
            raise InputError(f"{self.path} holds no run: there is no config.yaml; give a directory that train.py made")

    def save_head(self, drafter: DraftHead) -> None:
        tensors = {name: value.detach().cpu().contiguous() for name, value in drafter.own_state().items()}
        write_whole(self.head, lambda path: save_file(tensors, path))

    def load_head(self, drafter: DraftHead) -> None:
        """Fill the drafter's own tensors; every one of them must be there and have its shape."""
        if not self.head.is_file():
            raise InputError(f"{self.head} is missing; the run stopped before its first checkpoint: resume={self.path}")
        try:
            tensors = load_file(self.head)
        except SafetensorError as error:
            raise InputError(f"{self.head} is damaged ({error}); resume={self.path} writes it again") from error
        fill(drafter, tensors, self.head)

    def save_state(self, state: dict[str, Any]) -> None:
        write_whole(self.resume, lambda path: torch.save(state, path))

    def load_state(self) -> dict[str, Any] | None:
        """Everything needed to go on, or None if the run stopped before its first checkpoint."""
        if not self.resume.is_file():
            return None
        try:
            return torch.load(self.resume, weights_only=True, map_location="cpu")
        except Exception as error:  # a torn file raises whatever its first broken byte means
            raise InputError(f"{self.resume} is damaged; remove it to begin {self.path} again from step 0") from error

    def refuse_other_base(self, fingerprint: dict[str, Any]) -> None:
        """One sentence if the head was trained for another base than the one with this fingerprint."""
        try:
            made_for = json.loads(self.fingerprint.read_text())
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.fingerprint} is missing or damaged; train the run again: run={self.path}"
            ) from error
        refuse_other_base(made_for, fingerprint, self.path)


def refuse_other_base(
    made_for: dict[str, Any], fingerprint: dict[str, Any], place: Path, must_agree: Sequence[str] = MUST_AGREE
) -> None:
    """Raise InputError if the head at `place` was made for another base than the one with this fingerprint."""
    differing = [key for key in must_agree if made_for.get(key) != fingerprint.get(key)]
    if differing:
        raise InputError(
            f"the head in {place} was trained for base {made_for.get('base')}, and this base is "
            f"{fingerprint.get('base')} (they differ in {', '.join(differing)}); evaluate it with its own base"
        )


def fill(drafter: DraftHead, tensors: dict[str, Tensor], source: Path) -> None:
    own = drafter.own_state()
    wrong = sorted(set(own) ^ set(tensors)) or sorted(n for n in own if own[n].shape != tensors[n].shape)
    if wrong:
        raise InputError(f"{source} does not fit its drafter (first difference: {wrong[0]}); was config.yaml edited?")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])
