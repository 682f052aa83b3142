"""A base and its head with attention heads of width 16 padded to 32, which vLLM's CPU attention asks for at least.

The logits are the same: added numbers are zero, rotary pairs go where they keep their frequencies, and queries are
scaled for the square root of the width.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ctcdraft.models.loading import load_base

WIDTH, PADDED = 16, 32
PROJECTION = re.compile(r"(?:self_attn\.|attention\.)(q|k|v|o)\w*\.weight$")  # q_proj in the base, query in a head


def padded_weight(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a projection [heads * WIDTH, D] or, of the output, [D, heads * WIDTH] with padded heads."""
    if (found := PROJECTION.search(name)) is None:
        return weight
    rows = weight.T if found[1] == "o" else weight
    heads = rows.unflatten(0, (-1, WIDTH))
    padded = heads.new_zeros(len(heads), PADDED, heads.shape[2])
    half = torch.arange(WIDTH // 2)
    # Pair i turns by theta^(-2 i / width): in twice the width that is pair 2 i.
    padded[:, torch.cat([2 * half, 2 * half + PADDED // 2])] = heads
    rows = padded.flatten(0, 1) * ((PADDED / WIDTH) ** 0.5 if found[1] == "q" else 1.0)
    return (rows.T if found[1] == "o" else rows).contiguous()


def pad(base: Path, head: Path, folder: Path) -> tuple[Path, Path]:
    """Write both with padded heads; return their folders."""
    new_base, new_head = folder / "base", folder / "head"
    for old, new in ((base, new_base), (head, new_head)):
        shutil.copytree(old, new, copy_function=shutil.copyfile)
        new.chmod(0o755)
        tensors = load_file(old / "model.safetensors")
        tensors = {name: padded_weight(name, weight) for name, weight in tensors.items()}
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    edit(new_base / "config.json", lambda values: values.update(head_dim=PADDED))
    fingerprint = load_base(str(new_base), "float32", "cpu").fingerprint()
    edit(new_head / "config.json", lambda values: values["fingerprint"].update(weights=fingerprint["weights"]))
    return new_base, new_head


def edit(file: Path, change) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
