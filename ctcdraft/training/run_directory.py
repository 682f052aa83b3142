"""A run directory is a checkpoint. It knows files and fingerprints; not what a drafter does."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.io import atomic_write, refuse_existing_run, refuse_missing_run, write_text
from ctcdraft.models.fingerprint import was_quantized_since
from ctcdraft.training.loggers import WANDB_FILE

CHECKSUM_BYTES = 16
MATCHING_FIELDS = ("weights", "width", "vocabulary", "taps", "tokenizer", "chat_template", "adapter")


@dataclass(frozen=True)
class RunDirectory:
    """config.yaml, fingerprint.json, drafter.safetensors, metrics.jsonl; to go on from, also resume-STEP.pt."""

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
    def adapter(self) -> Path:
        """A folder, of runs that change their base (training/adapting.py)."""
        return self.path / "adapter"

    @property
    def command(self) -> Path:
        return self.path / "command.txt"

    @property
    def resume_files(self) -> list[Path]:
        """The files to go on from, the newest first."""
        return sorted(self.path.glob("resume-*.pt"), reverse=True)

    @property
    def last_step(self) -> int:
        """The step of the newest state, by its name; 0 without one."""
        return int(self.resume_files[0].stem.removeprefix("resume-")) if self.resume_files else 0

    @property
    def fingerprint(self) -> Path:
        return self.path / "fingerprint.json"

    def create(self, config: str, fingerprint: dict[str, Any], overwrite: bool) -> None:
        """Claim the directory for a new run, or refuse because it holds one. Overwriting removes the old run's
        own files and nothing else that may lie there."""
        if self.config.exists():
            if not (overwrite and self.fingerprint.exists()):
                self.refuse_to_overwrite()
            own = [self.config, self.head, *self.resume_files, self.metrics, self.fingerprint, self.command]
            own += [self.path / WANDB_FILE, *self.adapter.glob("adapter_*")]
            for file in own:
                file.unlink(missing_ok=True)
        write_text(self.fingerprint, json.dumps(fingerprint, indent=2) + "\n")
        self.write_config(config)  # last: it is what makes the directory a run

    def set_adapter(self, adapter: str) -> None:
        """From now on the head is that of the base with this adapter."""
        write_text(self.fingerprint, json.dumps(self.base_fingerprint() | {"adapter": adapter}, indent=2) + "\n")

    def write_config(self, config: str) -> None:
        write_text(self.config, config)

    def write_command(self, command: str) -> None:
        """What to type for the same run again, for people and for tables."""
        write_text(self.command, command + "\n")

    def refuse_to_overwrite(self) -> NoReturn:
        refuse_existing_run(self.path)

    def require(self) -> None:
        refuse_missing_run(self.path)

    def save_head(self, drafter: DraftHead, adapter: str | None = None) -> None:
        """adapter: the hash of what the base was changed by, which the head belongs to."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in drafter.trainable_state_dict().items()}
        metadata = None if adapter is None else {"adapter": adapter}
        atomic_write(self.head, lambda path: save_file(tensors, path, metadata=metadata))

    def load_head(self, drafter: DraftHead) -> None:
        """Fill the drafter's own tensors; every one of them must be there and have its shape."""
        if not self.head.is_file():
            raise InputError(f"{self.head} is missing; the run stopped before its first checkpoint: resume={self.path}")
        try:
            tensors = load_file(self.head)
            with safe_open(self.head, "pt") as file:
                adapter = (file.metadata() or {}).get("adapter")
        except SafetensorError as error:
            raise InputError(f"{self.head} is damaged ({error}); resume={self.path} writes it again") from error
        if self.fingerprint.is_file() and adapter != self.base_fingerprint().get(
            "adapter"
        ):  # a kill or a full disk between both
            raise InputError(
                f"{self.head} and {self.adapter} are of different steps; resume={self.path} writes both again"
            )
        load_trainable_state(drafter, tensors, self.head)

    def save_state(self, step: int, state: dict[str, Any], keep: int) -> None:
        """The newest state joins the others, of which the last `keep` stay; nothing goes before it is whole."""
        stream = io.BytesIO()
        torch.save(state, stream)
        payload = stream.getbuffer()

        def write(path: Path) -> None:
            with path.open("wb") as file:
                file.write(checksum(payload))
                file.write(payload)

        newest = self.path / f"resume-{step:09}.pt"
        atomic_write(newest, write)
        # A state beyond this step is a damaged one that the run had to go back behind.
        beyond = [file for file in self.resume_files if file.name > newest.name]
        for old in [*beyond, *self.resume_files[len(beyond) + keep :]]:
            with contextlib.suppress(OSError):
                old.unlink()

    def load_state(self) -> dict[str, Any] | None:
        """Everything needed to go on, of the newest state that is whole; None if there was no checkpoint yet."""
        for file in self.path.glob("resume-*.partial"):  # of a process that was killed while it wrote
            file.unlink(missing_ok=True)
        damaged: list[str] = []
        for file in self.resume_files:
            state = load_verified_state(file)
            if state is not None:
                if damaged:
                    print(f"{', '.join(damaged)} in {self.path} is damaged; going on from {file.name} instead")
                return state
            damaged.append(file.name)
        if damaged:
            raise InputError(
                f"{self.path} has no whole state ({', '.join(damaged)}: damaged); remove what is damaged to begin "
                "again from step 0"
            )
        return None

    def base_fingerprint(self) -> dict[str, Any]:
        """The fingerprint of the base and the corpus that the run was begun with."""
        try:
            return json.loads(self.fingerprint.read_text())
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.fingerprint} is missing or damaged; train the run again: run={self.path}"
            ) from error

    def refuse_other_base(self, fingerprint: dict[str, Any]) -> None:
        """One sentence if the head was trained for another base than the one with this fingerprint."""
        refuse_other_base(self.base_fingerprint(), fingerprint, self.path)

    def refuse_other_corpus(self, corpus: str) -> None:
        """One sentence if this is not the corpus that the run's steps were counted in: its batches would be others."""
        begun = self.base_fingerprint().get("corpus", corpus)
        if begun != corpus:
            raise InputError(
                f"{self.path} was trained on another corpus ({begun}) than is prepared now ({corpus}), so it cannot go "
                "on where it stopped; bring that corpus back, or begin a new run with run="
            )


def refuse_other_base(
    base_fingerprint: dict[str, Any],
    fingerprint: dict[str, Any],
    source: Path,
    must_agree: Sequence[str] = MATCHING_FIELDS,
) -> None:
    """Raise InputError if the head at `source` was made for another base than the one with this fingerprint. For the
    same base quantised it may guess: what it says is verified, and the report tells."""
    differing = [key for key in must_agree if base_fingerprint.get(key) != fingerprint.get(key)]
    if differing == ["adapter"]:
        trained = (
            "along with its base, which adapt=lora changed"
            if "adapter" in base_fingerprint
            else "for the base as it is"
        )
        here = "changed by a LoRA that was trained with another head" if "adapter" in fingerprint else "not changed"
        raise InputError(
            f"the head in {source} was trained {trained}, and this base is {here}; evaluate it by itself, with "
            f"checkpoint={source} and no base="
        )
    if differing and not (differing == ["weights"] and was_quantized_since(base_fingerprint, fingerprint)):
        apart = "; ".join(f"{key} {base_fingerprint.get(key)} there, {fingerprint.get(key)} here" for key in differing)
        names = [base_fingerprint.get("base"), fingerprint.get("base")]
        here = f"base {names[1]}" if names[0] != names[1] else "another base of that name"
        raise InputError(
            f"the head in {source} was trained for base {names[0]}, and this is {here} (they differ in "
            f"{', '.join(differing)}: {apart}); evaluate it with its own base"
        )


def checksum(payload: bytes | memoryview) -> bytes:
    return hashlib.blake2b(payload, digest_size=CHECKSUM_BYTES).digest()


def load_verified_state(file: Path) -> dict[str, Any] | None:
    """The state in a file that begins with its own checksum (torch would not notice a changed bit); None if damaged."""
    try:
        written = file.read_bytes()
        if written[:CHECKSUM_BYTES] != checksum(memoryview(written)[CHECKSUM_BYTES:]):
            return None
        return torch.load(io.BytesIO(written[CHECKSUM_BYTES:]), weights_only=True, map_location="cpu")
    except Exception:  # a torn file raises whatever its first broken byte means
        return None


def load_trainable_state(drafter: DraftHead, tensors: dict[str, Tensor], source: Path) -> None:
    own = drafter.trainable_state_dict()
    wrong = sorted(set(own) ^ set(tensors)) or sorted(n for n in own if not shapes_match(own[n], tensors[n]))
    if wrong:
        raise InputError(f"{source} does not fit its drafter (first difference: {wrong[0]}); was config.yaml edited?")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])
    drafter.after_load()


def shapes_match(own: Tensor, stored: Tensor) -> bool:
    """Whether it has its shape, or is a number where this is a row of one: the blank's bias in older runs."""
    return own.shape == stored.shape or own.numel() == stored.numel() == 1
