"""Run directory: config, draft head, metrics, and the states to resume from.

Every file is written whole or not at all, so a run that is killed at any moment can be resumed and evaluated.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.io import atomic_write, refuse_existing_run, refuse_missing_run, write_text
from ctcdraft.models.fingerprint import has_other_rotary, has_other_sum, was_quantized_since
from ctcdraft.training.loggers import WANDB_FILE

CHECKSUM_BYTES = 16
Fingerprint = dict[str, Any]  # of a base model; that of a run holds the hash of its corpus too
MATCHING_FIELDS = ("weights", "width", "vocabulary", "taps", "tokenizer", "chat_template", "adapter")


class RunDirectory:
    """Files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.head = path / "drafter.safetensors"
        self.fingerprint = path / "fingerprint.json"  # of base and corpus
        self.command = path / "command.txt"
        self.adapter = path / "adapter"  # a folder, of runs with a LoRA of the base model (training/lora.py)

    @property
    def resume_files(self) -> list[Path]:
        """The saved states, newest first."""
        return sorted(self.path.glob("resume-*.pt"), reverse=True)

    @property
    def last_step(self) -> int:
        """The step of the newest state; 0 without one."""
        return int(self.resume_files[0].stem.removeprefix("resume-")) if self.resume_files else 0

    def create(self, config: str, fingerprint: Fingerprint, overwrite: bool) -> None:
        """Write fingerprint and config of a new run; raise InputError where the directory holds one."""
        if self.config.exists():
            if not (overwrite and self.fingerprint.exists()):
                refuse_existing_run(self.path)
            # Only the files of a run: the directory may hold others. Config and fingerprint last, or a killed start
            # would leave states from which another run resumes.
            own = [*self.resume_files, self.head, self.metrics, self.command, self.path / WANDB_FILE]
            own += [*self.adapter.glob("adapter_*"), *self.path.glob("events.out.tfevents*")]
            for file in (*own, self.config, self.fingerprint):
                file.unlink(missing_ok=True)
        write_text(self.fingerprint, json.dumps(fingerprint, indent=2) + "\n")
        write_text(self.config, config)  # last: config.yaml marks the directory as a run

    def set_adapter(self, adapter: str) -> None:
        """Write into the fingerprint that the head belongs to the base model with this adapter (a hash)."""
        write_text(self.fingerprint, json.dumps(self.base_fingerprint() | {"adapter": adapter}, indent=2) + "\n")

    def require(self) -> None:
        refuse_missing_run(self.path)

    def save_head(self, drafter: DraftHead, adapter: str | None = None) -> None:
        """Write the head's trained tensors. adapter: hash of the base model's LoRA, which the head depends on."""
        tensors = {name: value.detach().cpu().contiguous() for name, value in drafter.trainable_state_dict().items()}
        metadata = None if adapter is None else {"adapter": adapter}
        atomic_write(self.head, lambda path: save_file(tensors, path, metadata=metadata))

    def load_head(self, drafter: DraftHead) -> None:
        """Load the drafter's trained tensors; raise InputError where the file is missing, damaged or does not fit."""
        if not self.head.is_file():
            raise InputError(f"{self.head} is missing; the run stopped before its first checkpoint: resume={self.path}")
        try:
            tensors = load_file(self.head)
            with safe_open(self.head, "pt") as file:
                adapter = (file.metadata() or {}).get("adapter")
        except SafetensorError as error:
            raise InputError(f"{self.head} is damaged ({error}); resume={self.path} writes it again") from error
        # They differ where a kill or a full disk came between the two files.
        if self.fingerprint.is_file() and adapter != self.base_fingerprint().get("adapter"):
            both = f"{self.head} and {self.adapter}"
            raise InputError(f"{both} are of different steps; resume={self.path} writes both again")
        load_trainable_state(drafter, tensors, self.head)

    def save_state(self, step: int, state: dict[str, Any], keep: int) -> None:
        """Write a state, then remove all but the newest `keep`."""
        stream = io.BytesIO()
        torch.save(state, stream)

        def write(path: Path) -> None:
            with path.open("wb") as file:
                file.writelines([checksum(stream.getbuffer()), stream.getbuffer()])

        newest = self.path / f"resume-{step:09}.pt"
        atomic_write(newest, write)
        # A state of a later step is damaged: the run has resumed from an earlier one.
        damaged = [file for file in self.resume_files if file.name > newest.name]
        for old in [*damaged, *self.resume_files[len(damaged) + keep :]]:
            with contextlib.suppress(OSError):  # the new state is written, which is what counts
                old.unlink()

    def load_state(self) -> dict[str, Any] | None:
        """Return the newest intact state, None before the first checkpoint; raise InputError where all are damaged."""
        for file in self.path.glob("resume-*.partial"):  # left by a process killed while writing
            file.unlink(missing_ok=True)
        damaged: list[str] = []
        for file in self.resume_files:
            if (state := load_verified_state(file)) is not None:
                if damaged:
                    print(f"{', '.join(damaged)} in {self.path} is damaged; resuming from {file.name} instead")
                return state
            damaged.append(file.name)
        if damaged:
            sentence = f"{self.path} has no intact state ({', '.join(damaged)}: damaged)"
            raise InputError(f"{sentence}; remove these files to start again from step 0")
        return None

    def base_fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the base model and the corpus that the run was started with."""
        try:
            return json.loads(self.fingerprint.read_text())
        except (OSError, ValueError) as error:
            sentence = f"{self.fingerprint} is missing or damaged; train the run again: run={self.path}"
            raise InputError(sentence) from error

    def refuse_other_base(self, fingerprint: Fingerprint) -> None:
        refuse_other_base(self.base_fingerprint(), fingerprint, self.path)

    def refuse_other_corpus(self, corpus: str) -> None:
        """Raise InputError if the run was trained on another corpus, whose batches would differ. corpus: its hash."""
        if (trained_on := self.base_fingerprint().get("corpus", corpus)) != corpus:
            raise InputError(
                f"{self.path} was trained on another corpus ({trained_on}) than is prepared now ({corpus}), so it "
                "cannot resume; bring that corpus back, or start a new run with run="
            )


def refuse_other_base(
    trained_for: Fingerprint, loaded: Fingerprint, source: Path, must_agree: Sequence[str] = MATCHING_FIELDS
) -> None:
    """Raise InputError if the head at `source` was trained for another base model than the one that is loaded."""
    differing = [key for key in must_agree if trained_for.get(key) != loaded.get(key)]
    differing += ["weights_sum"] * has_other_sum(trained_for, loaded)
    differing += ["rotary_frequencies"] * has_other_rotary(trained_for, loaded)
    if differing == ["adapter"]:
        trained = "together with a LoRA of its base" if "adapter" in trained_for else "for the unchanged base"
        here = "has the LoRA of another head" if "adapter" in loaded else "is unchanged"
        raise InputError(
            f"the head in {source} was trained {trained}, and this base {here}; evaluate it alone, with "
            f"checkpoint={source} and no base="
        )
    if differing == ["taps"]:
        theirs, ours = trained_for.get("taps"), loaded.get("taps")
        raise InputError(
            f"the head in {source} reads the layers {theirs} of its base, and this one returns {ours}; load it with "
            f"aux_layers={theirs}"
        )
    # The same base, quantised, is accepted: draft tokens are verified anyway, and the report names the quantisation.
    if differing and not (differing == ["weights"] and was_quantized_since(trained_for, loaded)):
        apart = "; ".join(f"{key} {trained_for.get(key)} there, {loaded.get(key)} here" for key in differing)
        theirs, name = trained_for.get("base"), loaded.get("base")
        here = f"base {name}" if theirs != name else "another base of that name"
        raise InputError(
            f"the head in {source} was trained for base {theirs}, and this is {here} (they differ in "
            f"{', '.join(differing)}: {apart}); evaluate it with its own base"
        )


def checksum(payload: bytes | memoryview) -> bytes:
    return hashlib.blake2b(payload, digest_size=CHECKSUM_BYTES).digest()


def load_verified_state(file: Path) -> dict[str, Any] | None:
    """Return the state in a file, or None if it is damaged."""
    try:
        content = file.read_bytes()
        # The file begins with a checksum of the rest, because torch.load does not notice a changed bit.
        if content[:CHECKSUM_BYTES] != checksum(memoryview(content)[CHECKSUM_BYTES:]):
            return None
        return torch.load(io.BytesIO(content[CHECKSUM_BYTES:]), weights_only=True, map_location="cpu")
    except Exception:  # a truncated file may raise almost anything
        return None


def load_trainable_state(drafter: DraftHead, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy trained tensors into a drafter; raise InputError where names or shapes differ. source: for the message."""
    own = drafter.trainable_state_dict()
    # (1,) and () match, because older runs stored the blank's bias as a number.
    wrong = sorted(set(own) ^ set(tensors)) or sorted(
        name for name, value in own.items()
        if value.shape != tensors[name].shape and not value.numel() == tensors[name].numel() == 1
    )  # fmt: skip
    if wrong:
        raise InputError(f"{source} does not fit its drafter (first difference: {wrong[0]}); was config.yaml edited?")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])
    drafter.after_load()
