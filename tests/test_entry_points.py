"""What a user types: the whole path on a random base, and every wrong word answered by one sentence and status 1."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny_models import random_lm, tiny_tokenizer

from ctcdraft.base import load_base
from ctcdraft.corpus import parts
from ctcdraft.front_door import load_drafter

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A random base, prompts, and a run trained on its answers through the command line."""
    home = tmp_path_factory.mktemp("world")
    random_lm(context=128).save_pretrained(home / "base")
    tiny_tokenizer().save_pretrained(home / "base")
    prompts = [{"id": f"p{n}", "category": "chat", "turns": [f"say {n}"]} for n in range(24)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run_script(patch, "train.py", *training("run=run"))
    return home


def training(*more: str) -> list[str]:
    return [
        "base=local", "base.path=base", "corpus.path=prompts.jsonl", "prepared=prepared", "answers.max_new_tokens=20",
        "trainer.steps=4", "trainer.probe_prompts=2", "trainer.probe_every=4", "trainer.checkpoint_every=2",
        "trainer.autocast=false", "trainer.warmup=1", "drafter.frames=5", "objective.labels=3",
        "decoding.max_new_tokens=10", *more,
    ]  # fmt: skip


def run_script(patch: pytest.MonkeyPatch, script: str, *words: str) -> None:
    patch.setattr(sys, "argv", [script, *words])
    runpy.run_path(str(REPOSITORY / script), run_name="__main__")


def refused(patch, capsys, script: str, *words: str) -> str:
    """The one line on stderr of a call that must end with status 1 and without a traceback."""
    with pytest.raises(SystemExit) as exit_:
        run_script(patch, script, *words)
    assert exit_.value.code == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_train_leaves_a_checkpoint(world):
    names = {file.name for file in (world / "run").iterdir()}
    assert {"config.yaml", "drafter.safetensors", "metrics.jsonl", "fingerprint.json"} <= names
    assert {name for name in names if name.startswith("resume")} == {"resume-000000002.pt", "resume-000000004.pt"}
    lines = [json.loads(line) for line in (world / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["tau"] >= 1.0
    assert 0 < lines[-1]["words_lost"] < 1  # whenever it is probed, what prefix search does not see
    assert "words_lost" not in lines[0]
    assert json.loads((world / "run" / "fingerprint.json").read_text())["corpus"]


def test_a_corpus_with_shifted_masks_refuses_to_train(world, monkeypatch, capsys):
    """Everything else is right with it: its checksums were made after the shift."""
    monkeypatch.chdir(world)
    shutil.copytree("prepared", "shifted")
    manifest = json.loads(Path("shifted/manifest.json").read_text())
    for name in manifest["parts"]:
        part = Path("shifted") / name
        lines = parts.read_part(part)
        parts.write_part(part, [line | {"mask": [0, *line["mask"][:-1]]} for line in lines])
        manifest["parts"][name] = parts.checksum(part)
    Path("shifted/manifest.json").write_text(json.dumps(manifest))
    said = refused(monkeypatch, capsys, "train.py", *training("run=shifted_run", "prepared=shifted"))
    assert "is shifted: the answer at token" in said
    assert not Path("shifted_run").exists()


def test_a_corpus_that_is_there_is_taken_unless_another_is_asked_for(world, monkeypatch, capsys):
    """The README's second command trains with a preset on what its first one prepared without."""
    monkeypatch.chdir(world)
    words = [word for word in training("run=as_it_is", "trainer.steps=1") if not word.startswith(("corpus", "answers"))]
    run_script(monkeypatch, "train.py", *words)
    assert (
        "prepared is taken as it is, made with answers.max_new_tokens=20 (now 512), 24 prompts"
        in capsys.readouterr().out
    )
    said = refused(monkeypatch, capsys, "train.py", *words, "run=other", "answers.max_new_tokens=30")
    assert "was made with answers.max_new_tokens=20 (now 30)" in said
    assert "prepared= of train.py" in said


def test_evaluate_reports_an_identical_text(world, monkeypatch):
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
    "words",
    [
        ["drafter=medusa", "objective=cross_entropy", "drafter.frames=3"],
        ["drafter=blockwise", "objective=distill", "drafter.frames=3"],
        [
            "drafter/correction=gru",
            "objective=sum",
            "drafter.body.blocks=2",
            "base.taps=[last,1]",
            "states=stored",
            "states.path=states",
            "trainer.pack=200",
            "trainer.prefetch=true",
            "trainer.rows=2",
        ],
    ],
    ids=["medusa", "blockwise", "all dials"],
)
def test_every_dial_goes_through_train_and_evaluate(world, monkeypatch, words, request):
    monkeypatch.chdir(world)
    run = f"run={request.node.callspec.id.replace(' ', '_')}"
    run_script(monkeypatch, "train.py", *training(run, *words))
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
def test_every_cell_of_table_2_trains_and_says_whether_it_is_a_crossing(world, monkeypatch, capsys, preset):
    monkeypatch.chdir(world)
    words = [word for word in training() if not word.startswith(("drafter.frames", "objective.labels"))]
    run_script(monkeypatch, "train.py", *words, f"experiment={preset}", f"run={preset}", "trainer.steps=3")
    assert len((world / preset / "metrics.jsonl").read_text().splitlines()) == 3
    assert ("a crossing, as in Table 2" in capsys.readouterr().out) == (preset in CROSSINGS)


def test_the_cells_of_table_2_are_one_sweep(world, monkeypatch, capsys):
    assert len(ABLATION) == 8
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", "-m", *training("experiment=glob(ablation_*_ce_direct)", "plan_only=true",
                                                        "drafter.frames=4", "objective.labels=4"))  # fmt: skip
    assert capsys.readouterr().out.count("taught words, read as words") == 2


def test_a_crossing_is_marked_in_the_report(world, monkeypatch):
    """A head taught by CTC and read directly: Table 2's "Medusa verify" of the paper's own drafter."""
    monkeypatch.chdir(world)
    run_script(
        monkeypatch, "evaluate.py", "contestants=[run@sparse]", "benchmark.path=prompts.jsonl", "benchmark.limit=1",
        "out=crossed", "decoding.max_new_tokens=8", "warm_up_tokens=4", "timing.questions=0",
    )  # fmt: skip
    rows = json.loads((world / "crossed" / "report.json").read_text())["rows"]
    said = "taught alignments but read as words by SparseTree: a crossing, as in Table 2 of the paper"
    assert [row["crossing"] for row in rows] == [None, said]
    shown = (world / "crossed" / "report.md").read_text()
    assert "| ctc@sparse (crossing) |" in shown
    assert f"- ctc@sparse is {said}" in shown
    assert "autoregressive (crossing)" not in shown


def test_resuming_raises_the_steps_only(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *training("run=again"))
    said = refused(monkeypatch, capsys, "train.py", "resume=again", "trainer.rows=2")
    assert "trainer.rows=2" in said
    assert "only trainer.steps= may be raised" in said
    assert "may only be raised" in refused(monkeypatch, capsys, "train.py", "resume=again", "trainer.steps=3")
    before = (world / "again" / "metrics.jsonl").read_text()
    run_script(monkeypatch, "train.py", "resume=again", "trainer.steps=6")
    after = (world / "again" / "metrics.jsonl").read_text()
    # From scratch the longer schedule would give steps 2 to 4 other learning rates: they were not taken again.
    assert after.startswith(before)
    assert len(after.splitlines()) == 6
    assert OmegaConf.load(world / "again" / "config.yaml").trainer.steps == 6


def test_a_run_killed_before_its_first_checkpoint_begins_again(world, monkeypatch):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *training("run=early"))
    trained = (world / "early" / "drafter.safetensors").read_bytes()
    for file in [*(world / "early").glob("resume-*.pt"), world / "early" / "drafter.safetensors"]:
        file.unlink()
    run_script(monkeypatch, "train.py", "resume=early")
    assert (world / "early" / "drafter.safetensors").read_bytes() == trained


def test_a_run_directory_gives_its_weights_back(world, monkeypatch):
    monkeypatch.chdir(world)
    base = load_base("base", "float32", "cpu")
    drafter = load_drafter(world / "run", base, paths=None)
    saved = load_file(world / "run" / "drafter.safetensors")
    assert set(saved) == set(drafter.own_state())
    for name, value in drafter.own_state().items():
        assert torch.equal(value, saved[name]), name
    other = OmegaConf.load(REPOSITORY / "configs" / "drafter" / "paths" / "collapse.yaml")
    assert type(load_drafter(world / "run", base, paths=other).paths).__name__ == "Collapse"


def test_overwriting_a_run_spares_what_is_not_its_own(world, monkeypatch):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *training("run=mine"))
    (world / "mine" / "thesis.txt").write_text("years of work")
    run_script(monkeypatch, "train.py", *training("run=mine", "overwrite=true"))
    assert (world / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_multirun_numbers_its_jobs(world, monkeypatch):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", "-m", *training("run=sweep", "drafter.frames=3,4"))
    assert [(world / "sweep" / job / "drafter.safetensors").is_file() for job in "01"] == [True, True]


def test_a_sweep_that_was_stopped_goes_on(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    words = ["-m", *training("run=swept", "drafter.frames=3,4")]
    run_script(monkeypatch, "train.py", *words)
    whole = (world / "swept" / "sweep.csv").read_text()
    (world / "swept" / "sweep.csv").unlink()
    shutil.rmtree(world / "swept" / "1")
    capsys.readouterr()
    run_script(monkeypatch, "train.py", *words)
    assert "swept/0 has its 4 steps already" in capsys.readouterr().out
    assert (world / "swept" / "sweep.csv").read_text() == whole
    said = refused(monkeypatch, capsys, "train.py", "-m", *training("run=swept", "drafter.frames=3,4", "seed=1"))
    assert "swept/0 holds a run already" in said


def test_prompts_beside_a_manifest_of_their_own_are_prompts(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    (world / "downloaded").mkdir()
    shutil.copy(world / "prompts.jsonl", world / "downloaded")
    (world / "downloaded" / "manifest.json").write_text('{"sources": []}')
    run_script(
        monkeypatch, "train.py",
        *training("run=never", "prepared=none", "corpus.path=downloaded", "plan_only=true"),
    )  # fmt: skip
    assert "24 prompts of 24 conversations" in capsys.readouterr().out


def test_ctrl_c_is_one_sentence(world, monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(world)
    monkeypatch.setattr("ctcdraft.evaluation.session.measure", interrupted)
    with pytest.raises(SystemExit) as left:
        run_script(monkeypatch, "evaluate.py", "checkpoint=run", "benchmark.path=prompts.jsonl", "out=stopped")
    assert left.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("evaluate.py: stopped by Ctrl-C; what was finished")


def test_plan_only_leaves_nothing(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    run_script(monkeypatch, "train.py", *training("run=planned", "plan_only=true"))
    said = capsys.readouterr().out
    assert "trainable parameters" in said
    assert "feasible" in said
    assert not (world / "planned").exists()


def test_a_base_that_is_not_here_is_planned_on_paper(world, monkeypatch, capsys):
    """By its own config, by that of a folder, and for a card that is not here; without plan_only it is refused."""
    monkeypatch.chdir(world)
    there = ["corpus.path=prompts.jsonl", "dtype=bfloat16", "plan_only=true"]
    run_script(monkeypatch, "data/prepare.py", "base=vicuna_7b", "out=never", *there)
    said = capsys.readouterr().out
    assert said.startswith("ON PAPER: vicuna_7b is not loaded, for no weights of lmsys/vicuna-7b-v1.3 are on this")
    assert "6.74 B parameters, 13.5 GB as bfloat16 (27.0 GB as float32)" in said
    assert "as characters / 4: no tokenizer is here" in said
    assert "hours" not in said.split("time", 1)[1].split("plan.flops=")[0]

    Path("shape").mkdir(exist_ok=True)
    shutil.copy("base/config.json", "shape")
    words = training("run=x", "prepared=never", "base.path=shape", "plan_only=true")
    run_script(monkeypatch, "train.py", *words, "plan.flops=1e12", "device=cuda", "dtype=bfloat16")
    said = capsys.readouterr().out
    assert "ON PAPER: shape is not loaded" in said
    assert "hours with states=live" in said.split("time  ")[-1]
    assert "at 1e+12 operations a second, memory taken to keep up, which is assumed" in said
    assert not [name for name in ("x", "never") if Path(name).exists()]


@pytest.mark.parametrize(
    ("script", "words", "sentence"),
    [
        ("train.py", training("run=run"), "run holds a run already; continue it with resume=run"),
        ("train.py", training("drafter.framse=8"), "framse"),
        ("train.py", ["base=local", "base.path=nowhere"], "no base LLM at nowhere"),
        ("train.py", ["base=local", "base.path=nowhere", "plan_only=true"], "no base LLM at nowhere"),
        ("train.py", training("run=x", "base.path=paper"), "cannot load the base paper"),
        (
            "train.py",
            training("run=x", "base.path=paper", "plan_only=true", "plan.flops=0"),
            "plan.flops=0 is no speed",
        ),
        (
            "train.py",
            training("run=x", "base.path=paper", "plan_only=true", "drafter=draft_model", "drafter.path=base"),
            "drafter=draft_model brings weights of its own",
        ),
        (
            "data/prepare.py",
            ["base=vicuna_7b", "base.config=gone.json", "corpus.path=prompts.jsonl", "plan_only=true", "out=never"],
            "no base LLM at gone.json",
        ),
        ("train.py", training("run=x", "objective.labels=9"), "5 frames cannot say 9 labels"),
        ("train.py", training("run=x", "objective.labels=0"), "objective.labels=0"),
        ("train.py", training("run=x", "drafter.frames=0"), "drafter.frames=0"),
        ("train.py", training("run=x", "objective=cross_entropy"), "drafter/paths=direct"),
        ("train.py", training("run=x", "objective=cross_entropy", "drafter/paths=direct"), "objective.labels=5"),
        ("train.py", training("run=x", "drafter=transducer", "objective=ctc"), "objective=transducer or prefix_tr"),
        ("train.py", ["base=local"], "base.path= is missing"),
        ("train.py", ["drafter/paths=colapse"], "did you mean drafter/paths/collapse"),
        ("train.py", training("run=x", "objective=prefix_ctc", "objective.decay=2"), "objective.decay=2"),
        ("train.py", training("run=x", "drafter/correction=gru", "drafter.correction.rank=0"), "rank=0"),
        ("train.py", training("run=x", "base.taps=[last,2]"), "layers from 0 to 1"),
        ("train.py", training("run=x", "trainer.anchors=0"), "trainer.anchors=0 is impossible"),
        ("train.py", training("run=x", "trainer.probe_every=0"), "trainer.probe_every=0 is impossible"),
        ("train.py", training("run=x", "decoding.temperature=-1"), "decoding.temperature=-1"),
        ("train.py", training("run=x", "trainer.probe_prompts=-3"), "trainer.probe_prompts=-3 is impossible"),
        ("train.py", training("run=x", "trainer.patience=0"), "trainer.patience=0 is impossible"),
        ("train.py", training("run=x", "trainer.accumulate=0"), "trainer.accumulate=0 is impossible"),
        ("train.py", training("run=x", "trainer.checkpoint_minutes=0"), "trainer.checkpoint_minutes=0 is impossible"),
        ("train.py", training("run=x", "trainer.learning_rate=0"), "trainer.learning_rate=0"),
        ("train.py", training("run=x", "trainer.learning_rate=nan"), "trainer.learning_rate=nan"),
        ("train.py", training("run=x", "drafter.frames=abc"), "drafter.frames=abc is impossible"),
        ("train.py", training("run=x", "decoding.nodes=abc"), "decoding.nodes=abc is impossible"),
        ("train.py", training("run=x", "objective=eagle"), "are for drafter=eagle"),
        ("train.py", training("run=x", "prepared=never", "objective.labels=9"), "5 frames cannot say 9 labels"),
        ("train.py", training("run=x", "prepared=never", "plan_only=true", "objective=cross_entropy"), "paths=direct"),
        ("train.py", training("run=x", "prepared=never", "drafter=eagle", "objective=ctc"), "has no blank"),
        ("train.py", training("run=x", "prepared=never", "decoding.nodes=0"), "decoding.nodes=0"),
        ("evaluate.py", ["checkpoint=run", "timing.questions=-1"], "timing.questions=-1 is impossible"),
        ("evaluate.py", ["checkpoint=run", "decoding.nodes=abc"], "decoding.nodes=abc"),
        ("evaluate.py", ["base=tiny", "contestants=[{prompt_lookup:{span:abc}}]"], "prompt_lookup.span=abc"),
        ("evaluate.py", ["base=tiny", "contestants=[{prompt_lookup:{span:0}}]"], "prompt_lookup.span=0"),
        (
            "evaluate.py",
            ["base=tiny", "contestants=[{cascade:{parts:{second:prompt_lookup,third:prompt_lookup}}}]"],
            "drafter cascade has no part third; it has first, second",
        ),
        ("train.py", training("run=x", "corpus.limit=5"), "24 prompts (now 5)"),
        ("train.py", training("run=x", "answers.temperature=1.0"), "answers.temperature=0.0 (now 1.0)"),
        ("train.py", training("run=x", "prepared=other", "corpus.path=gone.jsonl"), "gone.jsonl"),
        ("train.py", training("run=x", "prepared=other", "corpus.path=mistyped"), "mistyped is not there"),
        ("train.py", training("run=x", "prepared=other", "corpus.path=empty.jsonl"), "empty.jsonl"),
        ("train.py", ["resume=nowhere"], "nowhere holds no run"),
        ("train.py", training("run=x", "base.path=sliding"), "sliding window of 32"),
        ("evaluate.py", ["checkpoint=nowhere"], "contestant nowhere is neither a run directory"),
        ("evaluate.py", ["checkpoint=run", "benchmark.path=gone.jsonl"], "gone.jsonl"),
        ("evaluate.py", ["checkpoint=run", "base=local", "base.path=other_base"], "was trained for base"),
        ("data/prepare.py", ["base=local", "base.path=base", "corpus.path=empty.jsonl", "out=o"], "empty.jsonl"),
    ],
)
def test_a_wrong_word_is_one_sentence(world, monkeypatch, capsys, script, words, sentence):
    monkeypatch.chdir(world)
    (world / "empty.jsonl").touch()
    if not (world / "sliding").exists():
        transformers.MistralConfig(sliding_window=32, num_hidden_layers=1).save_pretrained(world / "sliding")
        random_lm(seed=1, context=128).save_pretrained(world / "other_base")
        tiny_tokenizer().save_pretrained(world / "other_base")
        random_lm().config.save_pretrained(world / "paper")
    said = refused(monkeypatch, capsys, script, *words)
    assert sentence in said
    assert not (world / "x").exists()
    assert not (world / "never").exists()
