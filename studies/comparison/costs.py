"""Counted cost of a draft: launches, host synchronisations, and bytes and operations at another shape (costs.json).

On the simulated accelerator every operation of a draft is seen with its weights. How often a weight is read, and by how
many rows it is multiplied, does not depend on its size; so the sizes of the same head at the shape of a 7B base give
the bytes and operations there, in the order of a hand count: attention over the text, and what is not a product with a
weight, are left out. Heads that run layers of the base are counted with as many layers as on the small base.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from benchmarks.decoding import settings
from benchmarks.launches import Case
from benchmarks.simulated.device import active, device
from benchmarks.simulated.tensor import OBSERVERS
from ctcdraft.config.build import build_drafter
from ctcdraft.config.cli import compose_config
from ctcdraft.config.contestants import ContestantConfig, build_contestant, load_base, resolve_contestants
from ctcdraft.errors import first_line
from ctcdraft.fused import OPERATIONS
from ctcdraft.io import write_text
from ctcdraft.models.meta import build_meta_base
from ctcdraft.models.stats import ModelStats
from studies.comparison.config import Comparison
from studies.comparison.jobs import Training, ladder_trainings
from studies.comparison.measure import is_trained
from studies.comparison.store import ResultStore

STEPS, FIRST_COUNTED = 4, 2  # drafts that are counted, after those that read the prompt and allocate
QUESTION = "Natalia has 4 boxes of 12 pens, and gives 5 of them away. How many pens has she?"
PRODUCTS = frozenset({"mm", "addmm", "addmm_", "linear", "matmul", "bmm", "baddbmm"})
LOOKUPS = frozenset({"embedding", "index", "index_select", "gather"})  # read a few rows


class WeightReads:
    """Counts, within drafts `first` to `last`, of reads of every named weight and of rows multiplied with it.

    Several weights may share one storage, as those that are joined for one product: a read counts for each of them
    whose part of the storage it covers.
    """

    def __init__(self, weights: Mapping[str, Any], first: int, last: int) -> None:
        self.parts: dict[int, list[tuple[int, int, str]]] = {}  # by storage
        for name, weight in weights.items():
            self.parts.setdefault(storage_of(weight.elem), []).append((*extent(weight.elem), name))
        self.reads, self.rows, self.looked_up = Counter[str](), Counter[str](), set[str]()
        self.first, self.last, self.drafts = first, last, 0

    def watch(self, draft: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            counted = self.first <= self.drafts < self.last
            self.drafts += 1
            if not counted:
                return draft(*arguments)
            OBSERVERS.append(self)
            try:
                return draft(*arguments)
            finally:
                OBSERVERS.remove(self)

        return watched

    def __call__(self, operation: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        kind = operation.overloadpacket.__name__
        read = {name for operand in operands for name in self.names_in(operand)}
        if kind in LOOKUPS:
            self.looked_up |= read
        is_view = any(storage_of(result) in self.parts for result in results)
        for name in read if results and not is_view and kind not in LOOKUPS else ():
            self.reads[name] += 1
            if kind in PRODUCTS:
                self.rows[name] += results[0].numel() // results[0].shape[-1]

    def names_in(self, operand: Tensor) -> list[str]:
        begin, end = extent(operand)
        return [name for low, high, name in self.parts.get(storage_of(operand), ()) if begin < high and low < end]

    def per_draft(self) -> dict[str, tuple[float, float]]:
        """Return reads and rows of every weight that was read."""
        drafts = self.last - self.first
        return {name: (count / drafts, self.rows[name] / drafts) for name, count in self.reads.items()}

    def unread(self, names: Iterable[str]) -> list[str]:
        return sorted({*names} - self.reads.keys() - self.looked_up)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first element of the storage that a tensor covers, and the one behind its last."""
    begin = int(tensor.storage_offset())
    if not tensor.numel():
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + 1 + sum(int((size - 1) * stride) for size, stride in steps)


def count_missing(config: Comparison, store: ResultStore, wait: bool = False) -> None:
    """Count one head per method on the first base, and write costs.json after each.

    One process does it, the others wait or go on; while it does, no loop is timed.
    """
    with store.lock("costs.json", wait=wait) as held:
        if held:
            with store.lock("machine", wait=True, shared=True):
                count_heads(config, store)


def count_heads(config: Comparison, store: ResultStore) -> None:
    rows, stored = store.rows(), read_costs(store)
    jobs = [job for job in ladder_trainings(config, rows) if job.is_compared and job.base == config.first_base]
    for job in jobs:
        if job.method not in stored and job.name in rows and is_trained(store.head_folder(job.name)):
            print(f"counting {job.head}", flush=True)
            try:
                stored[job.method] = count_head(config, store, job)
            except Exception as error:  # such as an operation that the device lacks; all else is worth measuring
                print(f"{job.head} has no counted cost: {first_line(error)}", flush=True)
                stored[job.method] = {"refused": first_line(error)}
            write_text(store.costs, json.dumps(stored, indent=1) + "\n")


def read_costs(store: ResultStore) -> dict[str, dict[str, Any]]:
    return json.loads(store.costs.read_text()) if store.costs.is_file() else {}


def count_head(config: Comparison, store: ResultStore, job: Training) -> dict[str, Any]:
    """Return the counts of one draft of a head on its base, and their bytes and operations at the other shape."""
    overrides = [*config.bases[job.base].base, f"contestants=[{store.head_folder(job.name)}]", "dtype=float32"]
    with active():
        node = compose_config("evaluate", *overrides, f"device={device()}")
        entries = resolve_contestants(node)
        entry = next(entry for entry in entries.values() if entry.run is not None)
        base = load_base(node, entries)
        drafter: Any = build_contestant(entry, base).drafter
        prompt = base.tokenizer(QUESTION, return_tensors="pt").input_ids[0]
        how = settings(config.counted.nodes, 4 * config.counted.nodes * (STEPS + 3), 0.0)
        weights = named_weights(drafter, base)
        reads = WeightReads(weights, FIRST_COUNTED, FIRST_COUNTED + STEPS)
        drafter.draft = reads.watch(drafter.draft)
        counts = Case(base, prompt, how, STEPS).count(drafter, False, OPERATIONS)
    own = [name for name, weight in weights.items() if not name.startswith("base.") and weight.dim() > 1]
    plain = {"launches": counts["beside"], "synchronisations": counts["synchronisations"], "unread": reads.unread(own)}
    return plain | cost_at_shape(config, entry, reads.per_draft(), config.counted.sizes.get(job.method, {}))


def cost_at_shape(
    config: Comparison, entry: ContestantConfig, per_draft: Mapping[str, Sequence[float]], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Return bytes and operations of a draft at the counted shape, with those of a step of the base.

    sizes: keys of the drafter that do not follow from the base and are larger there.
    """
    shape = compose_config("train", *config.counted.base).base
    layers = entry.config.base.aux_layers
    base = build_meta_base(shape.name, config.counted.dtype, config=OmegaConf.to_container(shape.of), aux_layers=layers)
    drafter = entry.config.drafter.copy()
    for key, value in sizes.items():
        OmegaConf.update(drafter, key, value)
    with torch.device("meta"):
        weights = named_weights(build_drafter(drafter, base), base)
    elements = {name: weights[name].numel() for name in per_draft if name in weights}
    bytes_read = sum(per_draft[name][0] * count * base.dtype.itemsize for name, count in elements.items())
    operations = sum(2 * per_draft[name][1] * count for name, count in elements.items())
    size = ModelStats.of(base)
    return {
        "bytes": bytes_read, "operations": operations, "base_bytes": (size.body + size.head) * size.itemsize,
        "base_operations": 2 * (size.body + size.head), "unknown_weights": sorted(set(per_draft) - set(elements)),
    }  # fmt: skip


def named_weights(drafter: Any, base: Any) -> dict[str, Tensor]:
    """Return the weights of the base and of the drafter by name; those that both have are the base's."""
    named = {f"base.{name}": weight for name, weight in base.lm.named_parameters()}
    shared = {id(weight) for weight in named.values()}
    own = drafter.named_parameters() if isinstance(drafter, nn.Module) else ()
    return named | {name: weight for name, weight in own if id(weight) not in shared}
