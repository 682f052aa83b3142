"""Who may look at whom, downwards only, and each heavy package by its one door: the map of ctcdraft/__init__.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ctcdraft

ROOT = Path(ctcdraft.__file__).parent
ENDS = {"allowed", "arena", "front_door", "jobs", "contestants", "published", "filling", "model_card"}
VERBS = ENDS | {"training", "evaluation", "corpus"}
ROOMS = VERBS | {"base", "drafters", "objectives", "decoding", "ctc", "nn"}
NEVER = {room: ROOMS - {room} for room in ("ctc", "decoding", "nn")}
NEVER |= dict.fromkeys(["drafters", "objectives"], VERBS)
BASES = ["base", "paper", "size", "readable", "fetching", "sharding"]
NEVER |= dict.fromkeys(BASES, VERBS | {"drafters", "objectives"})
NEVER |= dict.fromkeys(["placing", "fingerprints", "deepspeed_door", "base_values", "adapters"], ROOMS - {"decoding"})
NEVER |= {"training": ENDS | {"evaluation"}, "evaluation": ENDS | {"training"}, "corpus": VERBS - {"corpus"}}
DOORS = {"deepspeed": {"deepspeed_door.py"}, "accelerate": {"placing.py"}}
LOOKS = {
    (path.relative_to(ROOT).as_posix(), f"{node.module}.{each.name}" if isinstance(node, ast.ImportFrom) else each.name)
    for path in ROOT.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))  # within functions, too, and for types alone
    if isinstance(node, ast.Import | ast.ImportFrom)
    for each in node.names
}


@pytest.mark.parametrize("room", NEVER)
def test_nothing_looks_up(room):
    ours = [look for look in LOOKS if look[0].startswith((f"{room}/", f"{room}.py"))]
    above = tuple(f"ctcdraft.{other}." for other in NEVER[room])
    assert ours
    assert not {look for look in ours if f"{look[1]}.".startswith(above)}


@pytest.mark.parametrize("package", DOORS)
def test_a_package_has_one_door(package):
    assert {path for path, name in LOOKS if name.split(".")[0] == package} == DOORS[package]
