"""Every method trained on one base model for the same time, and evaluated: `python benchmarks/methods.py all`.

It runs train.py and evaluate.py one after the other; what exists is not made again. The number of steps of a drafter
follows from the processor time of its step on this machine: two short runs are timed, and their difference does not
contain the start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.drafters.draft_model import save_first_layers

HERE = Path(__file__).resolve().parent.parent
TINY = str(HERE / "data" / "tiny" / "base")
SHORT, LONG = 10, 40  # steps of the two timed runs


@dataclass(frozen=True)
class Method:
    """overrides: arguments of train.py. common: the name in RUN@NAME of the tree of the n most probable texts."""

    overrides: tuple[str, ...]
    common: str | None


# Heads with one label per frame get as many labels as frames; the others as in the demo.
METHODS = {
    "ctc": Method(("drafter=ctc", "drafter.frames=6", "objective=prefix_ctc", "objective.labels=5"), None),
    "ctc_gru": Method(("drafter=ctc_gru", "drafter.frames=6", "objective=prefix_ctc", "objective.labels=5"), None),
    "transducer": Method(
        ("drafter=transducer", "drafter.frames=6", "objective=prefix_transducer", "objective.labels=5"), None
    ),
    "medusa": Method(("drafter=medusa", "objective=cross_entropy"), "direct"),
    "hydra": Method(("drafter=hydra", "objective=cross_entropy"), "exact"),
    "eagle": Method(("drafter=eagle", "objective=eagle"), "exact"),
    "blockwise": Method(("drafter=blockwise", "objective=cross_entropy"), "direct"),
    "draft_model": Method(("drafter=draft_model", "objective=distill"), "exact"),
}
# The demo's settings, the same for all; validation by decoding would take time that is not training.
COMMON = (
    "hidden_states=offline", "engine=muon", "trainer.batch_size=12", "trainer.anchors_per_sequence=32",
    "trainer.learning_rate=6.0e-3",
    "trainer.warmup_steps=20", "trainer.probe_prompts=0", "trainer.num_threads=1", "answers.batch_size=64",
    "overwrite=true",
)  # fmt: skip
LOSSLESS = ("timing.questions=0", "warm_up_tokens=0", "decoding.max_new_tokens=64")


def main() -> None:
    options = arguments()
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for stage in ("train", "table", "lossless") if options.stage == "all" else (options.stage,):
        {"train": train_all, "table": table, "lossless": lossless}[stage](options, out)


def train_all(options: argparse.Namespace, out: Path) -> None:
    """Train every method into out/NAME, and write out/training.json: steps and processor seconds of each."""
    figures_file = out / "training.json"
    figures = json.loads(figures_file.read_text()) if figures_file.is_file() else {}
    save_first_layers(options.base, options.small_layers, out / "small")
    for name in options.drafters:
        if name in figures and (out / name / "drafter.safetensors").is_file():
            continue
        overrides = [*place(options, out), *COMMON, *METHODS[name].overrides, *options.more]
        overrides += [f"drafter.path={out / 'small'}"] if name == "draft_model" else []
        # Corpus and hidden states, of the layers that this method reads, are made here, outside the timed runs.
        run("train.py", *overrides, "trainer.steps=1", f"run={out / 'timed'}")
        steps, start = options.steps, None
        if steps is None:
            command = (*overrides, f"run={out / 'timed'}")
            short, long = (run("train.py", *command, f"trainer.steps={n}") for n in (SHORT, LONG))
            a_step = (long - short) / (LONG - SHORT)
            steps, start = max(round(60 * options.minutes / a_step), 1), short - SHORT * a_step
        took = run("train.py", *overrides, f"trainer.steps={steps}", f"run={out / name}")
        figures[name] = {
            "steps": steps,
            "processor_seconds": round(took, 1),
            "of_which_start": start and round(start, 1),
        }
        figures_file.write_text(json.dumps(figures, indent=1) + "\n")


def table(options: argparse.Namespace, out: Path) -> None:
    """Evaluate greedily with trees of 16 nodes: each run with its method's tree and with the shared one."""
    native = [str(out / name) for name in options.drafters] + ["prompt_lookup"]
    common = [f"{out / name}@{METHODS[name].common}" for name in options.drafters if METHODS[name].common]
    overrides = ["decoding.nodes=16", "decoding.max_new_tokens=128", "threads=1"]
    tiny = f"benchmark.limit={options.held_out}"
    run("evaluate.py", *evaluated_by(options, native + common), tiny, *overrides, f"out={out / 'tiny'}")
    run("evaluate.py", *evaluated_by(options, native), *gsm8k(options), *overrides, f"out={out / 'gsm8k'}")
    print(short_table(out))


def short_table(out: Path) -> str:
    """Return both reports' rows with the cost of training; methods without weights have 0 parameters."""
    trained = json.loads((out / "training.json").read_text())
    reports = [json.loads((out / name / "report.json").read_text())["rows"] for name in ("tiny", "gsm8k")]
    there = {row["drafter"]: row for row in reports[1]}
    lines = ["| drafter | parameters | steps | processor s | tau | c | tau, GSM8K | equal |", "|---|" + "---|" * 7]
    for row in reports[0]:
        made, other = trained.get(row["drafter"].partition("@")[0], {}), there.get(row["drafter"])
        equal = [f"{one['lossless']['equal']}/{one['prompts']}" for one in (row, other) if one is not None]
        cells = [
            row["drafter"], f"{row['draft_parameters']:,}", made.get("steps", "-"),
            f"{made['processor_seconds'] - made['of_which_start']:.0f}" if made.get("of_which_start") else "-",
            tau(row), f"{row['c']:.2f}", "-" if other is None else tau(other), ", ".join(equal),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def tau(row: dict[str, Any]) -> str:
    low, high = row["tau_ci"]
    return f"{row['tau']:.2f} [{low:.2f}, {high:.2f}]"


def lossless(options: argparse.Namespace, out: Path) -> None:
    """Evaluate every drafter, and two composed ones, at temperatures 0 and 1 on MT-Bench and GSM8K."""
    model = f"{{draft_model:{{path:{out / 'small'}}}}}"
    contestants = [str(out / name) for name in options.drafters]
    contestants += [
        "prompt_lookup", model, f"{{staged:{{parts:{{model:{model}}}}}}}",
        f"{{merged:{{parts:{{first:{out / 'ctc'}}}}}}}",
    ]  # fmt: skip
    overrides = [*evaluated_by(options, contestants), *LOSSLESS, "threads=1"]
    mt_bench = ("benchmark=mt_bench", f"benchmark.path={options.mt_bench_path}", f"benchmark.limit={options.mt}")
    for decoding in ("greedy", "sampling"):
        for name, where in (("mt_bench", mt_bench), ("gsm8k", gsm8k(options))):
            run("evaluate.py", *overrides, *where, f"decoding={decoding}", f"out={out / f'{name}_{decoding}'}")


def place(options: argparse.Namespace, out: Path) -> list[str]:
    return [
        *base(options), "corpus=tiny", f"corpus.limit={options.prompts}",
        f"answers.max_new_tokens={options.answer_tokens}", f"prepared={options.prepared or out / 'prepared'}",
        f"hidden_states.path={options.states or out / 'states'}",
    ]  # fmt: skip


def base(options: argparse.Namespace) -> list[str]:
    return ["base=tiny"] if options.base == TINY else ["base=local", f"base.path={options.base}"]


def evaluated_by(options: argparse.Namespace, contestants: list[str]) -> list[str]:
    return [*base(options), f"contestants=[{','.join(contestants)}]"]


def gsm8k(options: argparse.Namespace) -> tuple[str, ...]:
    return "benchmark=gsm8k", f"benchmark.path={options.gsm8k_path}", f"benchmark.limit={options.gsm8k}"


def run(script: str, *overrides: str) -> float:
    """Run a script of this repository and return its processor seconds."""
    print(shlex.join(["python", script, *overrides]), flush=True)
    before = os.times()
    if status := subprocess.run([sys.executable, str(REPOSITORY / script), *overrides]).returncode:
        raise SystemExit(f"{script} ended with status {status}; finished results are kept, so fix it and run again")
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["train", "table", "lossless", "all"])
    parser.add_argument("--out", required=True, help="a folder; what is there already is not made again")
    parser.add_argument("--base", default=TINY, help="folder of a causal LM")
    parser.add_argument("--drafters", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--minutes", type=float, default=3.0, help="processor time of each training")
    parser.add_argument("--steps", type=int, help="so many steps for all instead")
    parser.add_argument("--prompts", type=int, default=3200, help="of the tiny corpus, as in the demo")
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--small-layers", type=int, default=2, help="of the draft model")
    parser.add_argument("--prepared", help="a prepared corpus to share")
    parser.add_argument("--states", help="a store of states to share")
    parser.add_argument("--gsm8k-path", help="GSM8K's test.jsonl")
    parser.add_argument("--mt-bench-path", help="MT-Bench's question.jsonl")
    parser.add_argument("--held-out", type=int, default=120, help="how many prompts of the tiny benchmark")
    parser.add_argument("--gsm8k", type=int, default=100, help="how many questions")
    parser.add_argument("--mt", type=int, default=20, help="how many questions")
    parser.add_argument("--more", nargs="*", default=[], help="overrides for every train.py")
    return parser.parse_args()


if __name__ == "__main__":
    main()
