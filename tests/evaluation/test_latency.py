"""benchmark=latency: parts that add up, the least time by hand, base models with random weights, the entry point."""

import json
import re
import subprocess
import sys

import pytest
import torch
from small_evaluations import SETTINGS
from tiny_models import random_base
from training_parts import ctc_head

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.errors import InputError
from ctcdraft.evaluation.environment import HardwareLimits
from ctcdraft.evaluation.latency import LatencyBenchmark, measure_contexts, median_full_passes
from ctcdraft.models.meta import random_weights_base
from ctcdraft.report import figures

SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 96,
}


def latency(**changes) -> LatencyBenchmark:
    values = {"contexts": [16, 40, 1024], "nodes": [1, 4, 16], "passes": 3, "repeats": 1, "tau": {"ctc": 2.0}}
    return LatencyBenchmark(**{"name": "latency", "drafters": [], **values, **changes})


def test_parts_of_a_step_add_up():
    base = random_base(context=96)
    drafters = {
        "autoregressive": Autoregressive(base),
        "ctc": ctc_head(base),
        "prompt_lookup": PromptLookup(base, 2, 4),
    }
    report = measure_contexts(base, drafters, SETTINGS, latency(), seed=0)
    assert [read["context"] for read in report["reads"]] == [16, 40]  # 1,024 does not fit
    for read in report["reads"]:
        assert list(read["v"]) == ["1", "4", "16"]
        assert read["v"]["4"] == read["seconds_read"]["4"] / read["seconds_step"]
        assert read["seconds_prefill"] > 0
    assert [row["drafter"] for row in report["drafters"]] == list(drafters) * 2
    for row in report["drafters"]:
        assert row["tau"] is None
        assert row["c_head"] + (row["c_search"] or 0) == pytest.approx(row["c"])
        step_seconds = sum(row["time"][part] for part in figures.PART_COLOURS)
        step = report["reads"][row["context"] == 40]["seconds_step"]
        assert row["c"] + row["v"] + row["o"] == pytest.approx(step_seconds / step)
    autoregressive, ctc, lookup = report["drafters"][:3]
    assert autoregressive["predicted_speedup"] == pytest.approx(1)
    assert ctc["predicted_speedup"] == pytest.approx(2.0 / (ctc["c"] + ctc["v"] + ctc["o"]))
    assert ctc["c_search"] > 0
    assert (autoregressive["tree_nodes"], ctc["tree_nodes"]) == (1, SETTINGS.nodes)
    assert ctc["tau_to_break_even"] == pytest.approx(2.0 / ctc["predicted_speedup"])
    assert lookup["predicted_speedup"] is None
    assert lookup["c_search"] is None  # prompt lookup has no head and no search
    assert lookup["c_head"] == lookup["c"]


def test_steps_of_fixed_shapes_are_measured_in_three_parts():
    base = random_base(context=96)
    base.static_shapes = StaticShapes()
    drafters = {"autoregressive": Autoregressive(base), "ctc": ctc_head(base)}
    report = measure_contexts(base, drafters, SETTINGS, latency(), seed=0)
    for read in report["reads"]:
        assert read["v"]["16"] == read["seconds_read"]["16"] / read["seconds_step"]
    for row in report["drafters"]:
        assert row["time"]["tree"] == row["time"]["keep"] == 0
        assert min(row["time"][part] for part in ("draft", "read", "verify")) > 0
        assert row["c_search"] is None
    assert report["drafters"][1]["tree_nodes"] == SETTINGS.nodes


class Wide(Autoregressive):
    """Drafts the deepest tree allowed, and records the depths."""

    def draft(self, context, memory, rng):
        self.depths.append(context.depth)
        return TokenTree.chain(context.root, context.root.repeat(context.depth)), memory


def test_every_timed_step_drafts_a_whole_tree():
    """Trees are cut at the end of an answer; without room after it, most of a few steps would be cut."""
    base = random_base(context=96)
    wide = Wide(base)
    wide.depths = []
    rounds = []
    settings = latency(passes=3, repeats=2)
    spent, nodes = median_full_passes(
        base, {"wide": wide}, SETTINGS, torch.arange(40, 60), settings, lambda: rounds.append(len(wide.depths))
    )
    assert rounds == [4, 8, 12]  # alternating; the first step of a run is not timed
    assert spent["wide"].passes == 3
    assert nodes["wide"] == SETTINGS.nodes
    assert wide.depths == [SETTINGS.nodes - 1] * 4 * 3


def test_the_least_time_by_hand():
    limits = HardwareLimits(weight_bytes=800, weights=200, bandwidth=100.0, rate=4000.0)
    assert limits.min_seconds(kv_bytes=200, nodes=8) == 10.0  # 1,000 bytes at 100 per second; products take 0.8 s
    assert limits.min_seconds(kv_bytes=200, nodes=200) == 20.0  # 2 * 200 * 200 operations at 4,000 per second


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"contexts": []}, r"benchmark.contexts=\[\]"),
        ({"nodes": [0]}, "benchmark.nodes"),
        ({"tau": {"ctc": 0.5}}, "must be >= 1"),
        ({"tau": 3}, "must be given by drafter"),
    ],
)
def test_values_that_measure_nothing_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        latency(**wrong)


def test_contexts_that_are_all_too_long_are_refused():
    with pytest.raises(InputError, match="none leaves 64 of them"):
        latency(contexts=[90], nodes=[64]).usable_contexts(random_base(context=96), SETTINGS)


def test_a_shape_is_a_base_without_a_tokenizer():
    base = random_weights_base(SMALL, "small", "bfloat16", "cpu")
    assert (base.vocabulary, base.width, base.context_length, base.dtype) == (100, 32, 96, torch.bfloat16)
    assert not base.stop_token_ids
    assert base.fingerprint()["base"] == "small"
    tied = random_weights_base({**SMALL, "tie_word_embeddings": True}, "tied", "float32", "cpu")
    assert tied.head.weight is tied.embedding.weight
    for wrong in ({"model_type": "no such thing"}, {**SMALL, "logits_scaling": 8.0, "model_type": "granite"}):
        with pytest.raises(InputError):
            random_weights_base(wrong, "wrong", "float32", "cpu")
    with pytest.raises(InputError, match=r"the weights of huge take 6\.7 TB as float32, and cpu has"):
        random_weights_base({**SMALL, "hidden_size": 1 << 16, "intermediate_size": 1 << 22}, "huge", "float32", "cpu")
    for dtype, device, message in (
        ("fp32", "cpu", "dtype must be a floating-point"),
        ("int8", "cpu", "dtype must"),
        ("float32", "gpu", "device"),
    ):
        with pytest.raises(InputError, match=message):
            random_weights_base(SMALL, "wrong", dtype, device)


def test_bars_are_proportional_to_times():
    time = {"draft": 1.0, "tree": 0.5, "read": 2.0, "verify": 0.25, "keep": 0.25, "other": 0.0}
    untimed = {"drafter": "outside", "time": dict.fromkeys(time)}
    rows = [{"drafter": "a<b", "time": time}, {"drafter": "half", "time": {p: s / 2 for p, s in time.items()}}, untimed]
    drawn = figures.breakdown_figure(rows, "title").file()
    assert "a&lt;b" in drawn
    assert "outside" not in drawn
    wide = [float(match) for match in re.findall(r'width="([\d.]+)" height="20.0"', drawn)]
    assert wide[:6] == pytest.approx([130.0, 65.0, 260.0, 32.5, 32.5, 0.0])
    assert wide[6:] == pytest.approx([half / 2 for half in wide[:6]], abs=0.1)
    assert "4000.00" in drawn  # milliseconds in all


def test_the_entry_point_measures_a_shape(tmp_path):
    small = [f"base.of.{key}={value}" for key, value in SMALL.items()]
    benchmark = ["benchmark.contexts=[16,90]", "benchmark.nodes=[1,4]", "benchmark.passes=2", "benchmark.repeats=1"]
    arguments = [
        "base=shape",
        "base.name=small",
        *small,
        "benchmark=latency",
        *benchmark,
        "decoding.nodes=8",
        "device=cpu",
    ]
    command = [sys.executable, str(REPOSITORY / "evaluate.py"), *arguments, f"out={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    names = ["autoregressive", "ctc_gru", "ctc", "medusa", "hydra", "eagle", "blockwise", "prompt_lookup"]
    assert sorted(row["drafter"] for row in report["rows"]) == sorted(names)
    assert report["environment"]["random_weights"] is True
    assert {row["tau"] for row in report["rows"]} == {None}
    text = (tmp_path / "report.md").read_text()
    assert "random weights" in text
    assert "breakdown-16.svg" in text
    assert "| 16 |" in text.partition("utilization(4)")[2]
    assert "leave no room: 90." in text
    assert (tmp_path / "breakdown-16.svg").is_file()
    assert "after 16 tokens: v(4) = " in (tmp_path / "reading_by_nodes.svg").read_text()
