"""Import rules: downwards through the layers only, and each heavy package in one module."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ctcdraft

ROOT = Path(ctcdraft.__file__).parent
LAYERS = (  # lowest first; folders of one layer do not import each other
    (
        "errors",
        "io",
        "batch",
        "devices",
        "distributed",
        "progress",
        "hardware",
        "renamed",
        "machine_code",
        "array_kernels",
        "fused",
        "triton_parts",
    ),
    ("decoding", "ctc", "nn"),
    ("models",),
    ("drafters",),
    ("corpus", "objectives"),
    ("training", "evaluation"),
    ("planning", "report"),
    ("model_card",),
    ("config",),
    ("hub", "serving"),
    ("published",),
)
HEAVY = {
    "deepspeed": {"models/deepspeed.py"},
    "accelerate": {"models/device_map.py"},
    "vllm": {
        "corpus/generation/vllm.py",
        "serving/vllm_runner.py",
        "serving/configuration.py",
        "serving/cpu_sampling.py",
    },
    "optuna": {"training/search.py"},
    "numba": {f"{part}_kernels.py" for part in ("array", "ctc/search")},
    "triton": {
        *(f"ctc/triton_{part}.py" for part in ("conditioned", "prefix", "selection")),
        *("decoding/triton_step.py", "drafters/trees/triton_levels.py", "nn/triton_attention.py", "nn/triton_block.py"),
        "triton_parts.py",
    },
    "wandb": {"training/loggers.py"},
}
LEVEL = {folder: number for number, folders in enumerate(LAYERS) for folder in folders}
IMPORTS = {
    (path.relative_to(ROOT).as_posix(), f"{node.module}.{each.name}" if isinstance(node, ast.ImportFrom) else each.name)
    for path in ROOT.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))  # also inside functions and under TYPE_CHECKING
    if isinstance(node, ast.Import | ast.ImportFrom)
    for each in node.names
}


def folder_of(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")


def upwards() -> set[tuple[str, str]]:
    imports = set()
    for path, name in IMPORTS:
        parts = name.split(".")
        if parts[0] != "ctcdraft" or path == "__init__.py" or len(parts) < 2:
            continue
        importer, imported = folder_of(path), parts[1]
        if importer != imported and LEVEL[importer] <= LEVEL.get(imported, 0) and imported not in LAYERS[0]:
            imports.add((path, name))
    return imports


def test_every_folder_has_a_layer():
    assert {folder_of(path) for path, _ in IMPORTS} - {"__init__"} <= set(LEVEL)


def test_imports_go_downwards():
    assert upwards() == set()


def module_graph() -> dict[str, set[str]]:
    """Return the modules of the package, each with those that it imports."""
    modules = {f"ctcdraft/{path}".removesuffix(".py").replace("/", "."): set() for path, _ in IMPORTS}
    for path, name in IMPORTS:
        importer = f"ctcdraft/{path}".removesuffix(".py").replace("/", ".")
        modules[importer] |= {name, name.rpartition(".")[0]} & set(modules)  # `from MODULE import NAME` names both
    return modules


def test_no_modules_import_each_other_in_a_circle():
    """Not for the sake of a type either: a reader of one module of a circle has to read all of them."""
    modules = module_graph()
    assert {*TopologicalSorter(modules).static_order()} == {*modules}  # a circle raises CycleError, which names it


def test_a_server_does_without_corpora():
    """Neither pyarrow nor datasets is needed where vLLM serves a head."""
    modules = module_graph()
    reached = new = {name for name in modules if name.startswith("ctcdraft.serving")}
    while new := {name for one in new for name in modules[one]} - reached:
        reached = reached | new
    assert {"ctcdraft.serving.served_head", "ctcdraft.drafters.parallel"} <= reached
    assert not {name for name in reached if name.startswith("ctcdraft.corpus")}


def test_the_package_does_without_studies():
    assert {path for path, name in IMPORTS if name.split(".")[0] == "studies"} == set()


@pytest.mark.parametrize("package", HEAVY)
def test_a_heavy_package_is_imported_in_one_module(package):
    assert {path for path, name in IMPORTS if name.split(".")[0] == package} == HEAVY[package]
