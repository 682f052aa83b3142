"""The entry points as a user calls them, on a random base model: from prompts to a report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from entry_parts import REPOSITORY, expect_error, run_script, train_args

from ctcdraft.corpus import part_files


def test_train_leaves_a_checkpoint(world):
    names = {file.name for file in (world / "run").iterdir()}
    assert {"config.yaml", "drafter.safetensors", "metrics.jsonl", "fingerprint.json"} <= names
    assert {name for name in names if name.startswith("resume")} == {"resume-000000002.pt", "resume-000000004.pt"}
    lines = [json.loads(line) for line in (world / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["tau"] >= 1.0
    assert 0 < lines[-1]["words_lost"] < 1  # at every validation by decoding: probability mass that prefix search drops
    assert "words_lost" not in lines[0]
    assert json.loads((world / "run" / "fingerprint.json").read_text())["corpus"]


def test_a_corpus_with_shifted_masks_refuses_to_train(world, monkeypatch, capsys):
    """Everything else is valid: the checksums were computed after the shift."""
    monkeypatch.chdir(world)
    shutil.copytree("prepared", "shifted")
    manifest = json.loads(Path("shifted/manifest.json").read_text())
    for name in manifest["parts"]:
        part = Path("shifted") / name
        lines = part_files.read_part(part)
        for line in lines:
            line["spans"] = [(start + 1, end, ended) for start, end, ended in line["spans"]]
        part_files.write_part(part, lines)
        manifest["parts"][name] = part_files.file_checksum(part)
    del manifest["arrow"]
    Path("shifted/manifest.json").write_text(json.dumps(manifest))
    message = expect_error(monkeypatch, capsys, "train.py", *train_args("run=shifted_run", "prepared=shifted"))
    assert "is shifted: the answer at token" in message
    assert not Path("shifted_run").exists()


def test_an_existing_corpus_is_used_unless_another_is_requested(world, monkeypatch, capsys):
    """The README's second command trains with a preset on a corpus that was prepared without one."""
    monkeypatch.chdir(world)
    arguments = [
        argument
        for argument in train_args("run=as_it_is", "trainer.steps=1")
        if not argument.startswith(("corpus", "answers"))
    ]
    run_script(monkeypatch, "train.py", *arguments)
    assert (
        "prepared is used as it is; it was made with answers.max_new_tokens=20 (now 512), 24 prompts"
        in capsys.readouterr().out
    )
    message = expect_error(monkeypatch, capsys, "train.py", *arguments, "run=other", "answers.max_new_tokens=30")
    assert "was made with answers.max_new_tokens=20 (now 30)" in message
    assert "prepared= of train.py" in message


def test_evaluate_reports_identical_tokens(world, monkeypatch):
    monkeypatch.chdir(world)
    run_script(
        monkeypatch, "evaluate.py", "checkpoint=run", "benchmark.path=prompts.jsonl", "benchmark.limit=3", "out=out",
        "decoding.max_new_tokens=16",
    )  # fmt: skip
    report = json.loads((world / "out" / "report.json").read_text())
    assert {row["drafter"] for row in report["rows"]} == {"autoregressive", "prompt_lookup", "ctc"}
    for row in report["rows"]:
        assert row["lossless"]["equal"] == row["prompts"] == 3
        assert row["tau"] >= 1.0
    assert (world / "out" / "report.md").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ["drafter=medusa", "objective=cross_entropy", "drafter.frames=3"],
        ["drafter=blockwise", "objective=distill", "drafter.frames=3"],
        ["drafter=dspark", "drafter.body.blocks=1", "drafter.frames=3"],
        [
            "drafter=domino",
            "drafter.body.blocks=1",
            "drafter.frames=3",
            "hidden_states=offline",
            "hidden_states.path=states_of_domino",
        ],
        ["drafter=peagle", "drafter.body.blocks=2", "drafter.frames=3", "trainer.pack_length=200"],
        [
            "drafter/correction=gru",
            "objective=sum",
            "drafter.body.blocks=2",
            "base.aux_layers=[last,1]",
            "hidden_states=offline",
            "hidden_states.path=states",
            "trainer.pack_length=200",
            "trainer.prefetch=true",
            "trainer.batch_size=2",
        ],
    ],
    ids=["medusa", "blockwise", "dspark", "domino", "peagle", "all options"],
)
def test_every_option_works_in_train_and_evaluate(world, monkeypatch, arguments, request):
    monkeypatch.chdir(world)
    run = f"run={request.node.callspec.id.replace(' ', '_')}"
    run_script(monkeypatch, "train.py", *train_args(run, *arguments))
    out = run.replace("run=", "out=evaluated_")
    run_script(
        monkeypatch, "evaluate.py", run.replace("run=", "checkpoint="), out, "benchmark.path=prompts.jsonl",
        "benchmark.limit=2", "decoding.max_new_tokens=12", "warm_up_tokens=4", "timing.questions=1",
    )  # fmt: skip
    rows = json.loads((world / out.replace("out=", "") / "report.json").read_text())["rows"]
    assert [row["lossless"]["equal"] for row in rows] == [2, 2, 2]


ABLATION = sorted(file.stem for file in (REPOSITORY / "configs" / "experiment").glob("ablation_*.yaml"))
CROSSINGS = {f"ablation_{body}_{cell}" for body in ("linear", "transformer") for cell in ("ce_collapse", "ctc_direct")}


@pytest.mark.parametrize("preset", ABLATION)
def test_every_cell_of_table_2_trains_and_reports_a_crossing(world, monkeypatch, capsys, preset):
    monkeypatch.chdir(world)
    arguments = [
        argument for argument in train_args() if not argument.startswith(("drafter.frames", "objective.labels"))
    ]
    run_script(monkeypatch, "train.py", *arguments, f"experiment={preset}", f"run={preset}", "trainer.steps=3")
    assert len((world / preset / "metrics.jsonl").read_text().splitlines()) == 3
    assert ("a mismatch, as in Table 2" in capsys.readouterr().out) == (preset in CROSSINGS)


def test_the_cells_of_table_2_are_one_sweep(world, monkeypatch, capsys):
    assert len(ABLATION) == 8
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", "-m", *train_args("experiment=glob(ablation_*_ce_direct)", "plan_only=true",
                                                        "drafter.frames=4", "objective.labels=4"))  # fmt: skip
    assert capsys.readouterr().out.count("trained as tokens, read as tokens") == 2


def test_a_crossing_is_marked_in_the_report(world, monkeypatch):
    """A head trained by CTC and read per frame: "Medusa verify" of the paper's drafter in Table 2."""
    monkeypatch.chdir(world)
    run_script(
        monkeypatch, "evaluate.py", "contestants=[run@sparse]", "benchmark.path=prompts.jsonl", "benchmark.limit=1",
        "out=crossed", "decoding.max_new_tokens=8", "warm_up_tokens=4", "timing.questions=0",
    )  # fmt: skip
    rows = json.loads((world / "crossed" / "report.json").read_text())["rows"]
    message = "trained as alignments but read as tokens by StaticPerFrameTree: a mismatch, as in Table 2 of the paper"
    assert [row["crossing"] for row in rows] == [None, message]
    markdown = (world / "crossed" / "report.md").read_text()
    assert "| ctc@sparse (mismatch) |" in markdown
    assert f"- ctc@sparse is {message}" in markdown
    assert "autoregressive (mismatch)" not in markdown


def test_a_head_with_an_untrained_blank_is_refused_by_ctc_trees(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *train_args("run=tokens", "objective=cross_entropy", "drafter/tree=per_frame",
                                                  "objective.labels=5", "trainer.steps=2"))  # fmt: skip
    capsys.readouterr()
    arguments = ["contestants=[tokens@prefix_search]", "benchmark.path=prompts.jsonl", "out=never"]
    assert "leaves the blank untrained" in expect_error(monkeypatch, capsys, "evaluate.py", *arguments)


def test_plan_only_writes_nothing(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *train_args("run=planned", "plan_only=true"))
    message = capsys.readouterr().out
    assert "trainable parameters" in message
    assert "feasible" in message
    assert not (world / "planned").exists()


def test_a_base_without_weights_is_planned_in_a_dry_run(world, monkeypatch, capsys):
    """By its preset, by the config of a folder, and for an accelerator that is not present."""
    monkeypatch.chdir(world)
    options = ["corpus.path=prompts.jsonl", "dtype=bfloat16", "plan_only=true"]
    run_script(monkeypatch, "data/prepare.py", "base=vicuna_7b", "out=never", *options)
    message = capsys.readouterr().out
    assert message.startswith(
        "DRY RUN: vicuna_7b is not loaded, because no weights of lmsys/vicuna-7b-v1.3 are on this"
    )
    assert "6.74 B parameters, 13.5 GB as bfloat16 (27.0 GB as float32)" in message
    assert "as characters / 4: there is no tokenizer" in message
    assert "hours" not in message.split("time", 1)[1].split("plan.flops=")[0]

    Path("shape").mkdir(exist_ok=True)
    shutil.copy("base/config.json", "shape")
    arguments = train_args("run=x", "prepared=never", "base.path=shape", "plan_only=true")
    run_script(monkeypatch, "train.py", *arguments, "plan.flops=1e12", "device=cuda", "dtype=bfloat16")
    message = capsys.readouterr().out
    assert "DRY RUN: shape is not loaded" in message
    assert "seconds with hidden_states=online" in message.split("time  ")[-1]
    assert "at 1e+12 FLOP/s, not limited by memory bandwidth, which is assumed" in message
    assert not [name for name in ("x", "never") if Path(name).exists()]
