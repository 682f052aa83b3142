"""A head that is saved, loaded in another process and used through stock `generate` does not change the output."""

import hashlib
import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from tiny_models import random_base, random_lm, tiny_tokenizer
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ctcdraft.config.cli import REPOSITORY
from ctcdraft.config.drafters import build_drafter, load_drafter
from ctcdraft.decoding.sampling import GumbelNoise, warp
from ctcdraft.errors import InputError
from ctcdraft.hub import PublishedHead
from ctcdraft.training.run_directory import RunDirectory
from studies.results import CONFIG, selected

PROMPT = torch.tensor([[0, 7, 9, 9, 9, 30]])
ASKED = {"max_new_tokens": 40, "eos_token_id": 4, "pad_token_id": 1}
BEFORE = """
import sys, torch, transformers
HEAD = sys.argv[1] + "/head"
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/base")
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1] + "/base")
inputs = {"input_ids": torch.tensor([[0, 7, 9, 9, 9, 30]]), "max_new_tokens": 40, "eos_token_id": 4, "pad_token_id": 1}

import ctcdraft.hub
made, loop = [], ctcdraft.hub.generate
ctcdraft.hub.generate = lambda *given: made.append(loop(*given)) or made[-1]  # or stock decoding would do as well
"""
AFTER = """
import hashlib, json
weights = [(name, value.tolist()) for name, value in sorted(head.drafter.trainable_state_dict().items())]
(one,) = made
print(json.dumps({
    "ids": ids.tolist(), "said": one.tokens, "passes": len(one.passes), "nodes": [step.nodes for step in one.passes],
    "weights": hashlib.sha256(json.dumps(weights).encode()).hexdigest(),
}))
"""


def three_lines() -> str:
    """Return the README's example."""
    text = (REPOSITORY / "README.md").read_text()
    return next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "PublishedHead" in block)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base, a run of an untrained head for it, and that head published."""
    import hydra
    from omegaconf import OmegaConf

    from ctcdraft.config.cli import register_resolvers

    home = tmp_path_factory.mktemp("home")
    random_lm().save_pretrained(home / "base")
    tiny_tokenizer().save_pretrained(home / "base")
    register_resolvers()
    with hydra.initialize_config_dir(str(REPOSITORY / "configs"), version_base=None):
        given = ["base=local", f"base.path={home / 'base'}", "device=cpu", "drafter.frames=3", "drafter=ctc_gru"]
        config = hydra.compose("train", given)
    base = random_base()
    torch.manual_seed(0)
    run = RunDirectory(home / "run")
    run.create(OmegaConf.to_yaml(config, resolve=True), base.fingerprint() | {"corpus": "none"}, overwrite=False)
    run.save_head(build_drafter(config.drafter, base))
    measured = {
        "drafter": "ctc_gru", "benchmark": "tiny", "temperature": 0.0, "nodes": 8, "prompts": 3, "tau": 1.5,
        "tau_ci": [1.4, 1.6], "speedup": 1.1, "speedup_ci": [1.0, 1.2], "hardware": "a CPU", "dtype": "float32",
        "lossless": {"owes": "words", "equal": 3, "rounding": 0, "prompts": 3},
    }  # fmt: skip
    rows = [measured, measured | {"drafter": "prompt_lookup", "benchmark": "not of this head"}]
    where = {"git": {"commit": "0123456789"}, "date": "today", "command": "python evaluate.py"}
    (run.path / "evaluation" / "tiny-greedy").mkdir(parents=True)
    report = run.path / "evaluation" / "tiny-greedy" / "report.json"
    report.write_text(json.dumps({"rows": rows, "environment": where}))
    (run.path / "evaluation" / "latency-tiny").mkdir()
    timed = {"rows": [{"drafter": "ctc_gru"}], "environment": where}  # no tokens, no verdict
    (run.path / "evaluation" / "latency-tiny" / "report.json").write_text(json.dumps(timed))
    PublishedHead.from_run(run.path, base).save_pretrained(home / "head")
    return home


def loaded(home, model=None):
    model = model or random_lm()
    return model, PublishedHead.from_pretrained(home / "head", model=model, tokenizer=tiny_tokenizer())


def test_in_another_process_the_output_is_that_of_generate(home):
    plain = random_lm().generate(PROMPT, **ASKED, do_sample=False)
    fresh = subprocess.run(
        [sys.executable, "-c", BEFORE + three_lines() + AFTER, str(home)], capture_output=True, text=True, timeout=200
    )
    assert fresh.returncode == 0, fresh.stderr
    found = json.loads(fresh.stdout.split("\n")[-2])
    assert found["ids"] == plain.tolist()
    assert (
        found["said"] == plain[0, PROMPT.shape[1] :].tolist()
    )  # by our decoding loop, which stock decoding does not call
    assert found["passes"] > 5
    assert all(nodes > 1 for nodes in found["nodes"][:-1])  # and there were draft tokens in every step but the last
    own = load_drafter(home / "run", random_base(), None).trainable_state_dict()
    weights = json.dumps([(name, value.tolist()) for name, value in sorted(own.items())])
    assert found["weights"] == hashlib.sha256(weights.encode()).hexdigest()


def test_the_snippet_of_an_old_model_card_runs(home):
    """Cards of heads that were published before ctcdraft.published became ctcdraft.hub."""
    model, names = random_lm(), {}
    exec("from ctcdraft.published import PublishedHead", names)
    names |= {"HEAD": home / "head", "model": model, "tokenizer": tiny_tokenizer()}
    names["inputs"] = {"input_ids": PROMPT, **ASKED}
    exec(
        "head = PublishedHead.from_pretrained(HEAD, model=model, tokenizer=tokenizer)\n"
        "ids = model.generate(**inputs, custom_generate=head.generate)",
        names,
    )
    assert torch.equal(names["ids"], random_lm().generate(PROMPT, **ASKED, do_sample=False))
    assert isinstance(names["PublishedHead"].of_run(home / "run", random_base()), PublishedHead)


def test_the_weights_are_those_of_the_run(home):
    _, head = loaded(home)
    theirs = load_drafter(home / "run", random_base(), None).trainable_state_dict()
    assert theirs
    assert all(torch.equal(value, theirs[name]) for name, value in head.drafter.trainable_state_dict().items())


def test_sampled_ids_repeat_under_one_torch_seed(home):
    model, head = loaded(home)
    how = {**ASKED, "do_sample": True, "temperature": 0.8, "top_k": 20, "custom_generate": head.generate}
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(model.generate(PROMPT, **how).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def autoregression(model, seed: int, asked: dict) -> list[list[int]]:
    """Decode with the stock model and the warpers of transformers, sampled with our Gumbel noise."""
    torch.manual_seed(seed)
    noise = GumbelNoise(int(torch.randint(2**31, ())))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(asked["temperature"])])
    if asked["top_k"]:
        warpers.append(TopKLogitsWarper(asked["top_k"]))
    if asked["top_p"] < 1:
        warpers.append(TopPLogitsWarper(asked["top_p"]))
    ids = PROMPT
    with torch.no_grad():
        while ids.shape[1] < PROMPT.shape[1] + ASKED["max_new_tokens"] and ids[0, -1] != ASKED["eos_token_id"]:
            scores_1V = warpers(ids, model(ids).logits[:, -1].float()).log_softmax(dim=-1)
            drawn = noise.gumbel(torch.tensor([ids.shape[1]]), scores_1V.shape[1])
            ids = torch.cat([ids, (scores_1V + drawn).argmax(dim=-1, keepdim=True)], dim=1)
    return ids.tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.6, 0, 1.0), (1.7, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.5), (1.5, 8, 0.9), (0.01, 0, 1.0)],
)
def test_sampled_ids_are_those_of_autoregression_under_the_same_generation_config(home, temperature, top_k, top_p):
    """As a GenerationConfig and as keyword arguments; and no two settings give the same tokens."""
    model, head = loaded(home)
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    config = transformers.GenerationConfig(**ASKED, **asked, do_sample=True)
    texts = []
    for seed in range(2):
        expected = autoregression(model, seed, asked)
        torch.manual_seed(seed)
        assert model.generate(PROMPT, generation_config=config, custom_generate=head.generate).tolist() == expected
        torch.manual_seed(seed)
        how = {**ASKED, **asked, "do_sample": True, "custom_generate": head.generate}
        assert model.generate(PROMPT, **how).tolist() == expected
        texts.append(expected)
    for change in ({"temperature": 1.0}, {"top_k": 0}, {"top_p": 1.0}):
        without = [autoregression(model, seed, asked | change) for seed in range(2)]
        assert (without == texts) == (asked | change == asked), change


def test_the_docstring_has_the_measured_losslessness():
    """Of bfloat16, from results/losslessness."""
    measured = selected(CONFIG["tables"]["losslessness_bfloat16"], REPOSITORY)
    (row,) = measured.query("method == 'ctc_gru'").to_dict("records")
    text = " ".join(PublishedHead.generate.__doc__.split())
    assert f"on {row['compared'] - row['equal']} of {row['compared']} prompts" in text
    assert "float32" in text
    assert "seed" in text


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.3, 12, 1.0), (1.0, 0, 0.8), (0.5, 9, 0.6)]
)
def test_warping_equals_that_of_generate(temperature, top_k, top_p):
    logits_NV = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    theirs_NV = warpers(None, logits_NV.clone()).log_softmax(dim=-1)
    torch.testing.assert_close(warp(logits_NV, temperature, top_k, top_p), theirs_NV)


def test_the_card_has_the_measurements_of_this_head_alone(home):
    card = (home / "head" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: ctcdraft")
    assert "| tiny | 0 | 8 | 3 | 1.50 [1.40, 1.60] | 1.10 [1.00, 1.20] | 3/3 |" in card
    assert "not of this head" not in card
    assert "| frames | 3 |" in card


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor is not supported"),
        ({"stop_strings": ["x"], "tokenizer": tiny_tokenizer()}, "stop_strings= is not supported"),
        ({"stop_strings": "x"}, "stop_strings= is not supported"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate is not supported"),
        ({"stopping_criteria": [transformers.MaxTimeCriteria(5.0)]}, "MaxTimeCriteria is not supported"),
        ({"inputs": PROMPT.repeat(2, 1)}, "batch size must be 1, got 2"),
        ({"inputs": PROMPT.repeat(1, 99)}, r"prompt has \d+ tokens, and the base's context \d+, which leaves no"),
        ({"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}, "2 positions of the prompt are masked"),
        ({"inputs": None, "inputs_embeds": torch.zeros(1, 3, 32)}, "an empty prompt"),
        ({"inputs_embeds": torch.zeros(1, 6, 32)}, "one of embeddings, is not supported"),
    ],
)
def test_options_that_would_be_ignored_are_refused(home, asked, sentence):
    model, head = loaded(home)
    with pytest.raises(InputError, match=sentence):
        model.generate(**{"inputs": PROMPT, **ASKED, "do_sample": False, **asked}, custom_generate=head.generate)


def test_another_model_is_refused_when_loaded_and_when_used(home):
    apart = r"this is another base of that name \(they differ in weights: weights \w+ there, \w+ here\)"
    with pytest.raises(InputError, match=apart):
        loaded(home, random_lm(seed=1))
    _, head = loaded(home)
    with pytest.raises(InputError, match="loaded for another model object"):
        random_lm().generate(PROMPT, **ASKED, custom_generate=head.generate)
    with pytest.raises(InputError, match="tokenizer= is missing"):
        PublishedHead.from_pretrained(home / "head", model=random_lm())
    with pytest.raises(InputError, match=r"no head at .*gone"):
        PublishedHead.from_pretrained(home / "gone", model=random_lm(), tokenizer=tiny_tokenizer())
