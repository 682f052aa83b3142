"""A run directory is a checkpoint. It knows files and fingerprints; not what a drafter does."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctcdraft.drafters.drafter import DraftHead
from ctcdraft.errors import InputError

MUST_AGREE = ("weights", "width", "vocabulary", "taps", "tokenizer")


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

    def begin(self, config: str, fingerprint: dict[str, Any], overwrite: bool) -> None:
        """Claim the directory for a new run, or refuse because it holds one."""
        if self.config.exists():
            if not overwrite:
                self.refuse_to_overwrite()
            shutil.rmtree(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.config.write_text(config)
            (self.path / "fingerprint.json").write_text(json.dumps(fingerprint, indent=2) + "\n")
        except OSError as error:
            raise InputError(f"cannot write the run directory {self.path}: {error}; choose another run=") from error

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
        fill(drafter, load_file(self.head), self.head)

    def save_state(self, state: dict[str, Any]) -> None:
        write_whole(self.resume, lambda path: torch.save(state, path))

    def load_state(self) -> dict[str, Any]:
        if not self.resume.is_file():
            raise InputError(f"{self.path} holds no resume.pt, so there is nothing to resume; start anew with run=")
        return torch.load(self.resume, weights_only=True)

    def refuse_other_base(self, fingerprint: dict[str, Any]) -> None:
        """One sentence if the head was trained for another base than the one with this fingerprint."""
        made_for = json.loads((self.path / "fingerprint.json").read_text())
        differing = [key for key in MUST_AGREE if made_for.get(key) != fingerprint.get(key)]
        if differing:
            raise InputError(
                f"the head in {self.path} was trained for base {made_for.get('base')}, and this base is "
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


def write_whole(path: Path, write: Any) -> None:
    """Write beside the file and move it into place, so that a kill leaves the old file or the new one."""
    beside = path.with_name(path.name + ".partial")
    try:
        write(beside)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error}; free some space and resume") from error
