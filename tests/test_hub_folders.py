"""Folders of published heads: half precision, damaged and older files, the policy in them, other bases."""

import hashlib
import json
import shutil

import pytest
import torch
import transformers
from test_hub import ASKED, PROMPT, home, loaded  # noqa: F401
from tiny_models import random_base, random_lm, tiny_tokenizer

from ctcdraft.drafters.tree_policy import AdaptivePolicy
from ctcdraft.errors import InputError
from ctcdraft.hub import PublishedHead
from ctcdraft.models.base_model import BaseLM
from ctcdraft.training.run_directory import RunDirectory, refuse_other_base


def test_half_precision_halves_the_file(home, tmp_path):  # noqa: F811
    whole = PublishedHead.from_run(home / "run", random_base())
    PublishedHead.from_run(home / "run", random_base(), dtype=torch.float16).save_pretrained(tmp_path)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tmp_path, home / "head")]
    assert sizes[0] < 0.6 * sizes[1]
    model = random_lm()
    head = PublishedHead.from_pretrained(tmp_path, model=model, tokenizer=tiny_tokenizer())
    for name, weight in head.drafter.trainable_state_dict().items():
        assert torch.equal(weight, whole.drafter.trainable_state_dict()[name].half().float())
    ids = model.generate(PROMPT, **ASKED, do_sample=False, custom_generate=head.generate)
    assert torch.equal(ids, random_lm().generate(PROMPT, **ASKED, do_sample=False))


def test_a_run_directory_is_no_published_head(home):  # noqa: F811
    with pytest.raises(InputError, match=r"run is a run directory, not a published head; PublishedHead\.from_run"):
        PublishedHead.from_pretrained(home / "run", model=random_lm(), tokenizer=tiny_tokenizer())


def test_a_base_that_returns_too_few_layers_is_told_which(home):  # noqa: F811
    fingerprint = json.loads((home / "run" / "fingerprint.json").read_text())
    with pytest.raises(InputError, match=r"reads the layers \['last', 1\] of its base.* aux_layers=\['last', 1\]"):
        refuse_other_base(fingerprint | {"taps": ["last", 1]}, fingerprint, home / "run")


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        ("config.json", lambda text: text.replace("ctcdraft.drafters.parallel", "os"), "wants to call os"),
        ("config.json", lambda text: text[:40], "missing or damaged"),
        ("config.json", lambda text: text.replace('"nodes"', '"knots"'), "has no `nodes`"),
        ("config.json", lambda text: text.replace('"nodes": 16', '"nodes": "16"'), "missing or damaged"),
        ("config.json", lambda text: text.replace('"nodes": 16', '"nodes": 1000000000000'), "missing or damaged"),
        ("config.json", lambda text: text.replace('"taps"', '"tops"'), "missing or damaged"),
        ("config.json", lambda text: text.replace('"last"', '{"_target_": "torch.load"}'), "missing or damaged"),
        ("config.json", lambda text: text.replace('"last"', '"${oc.env:HOME}"'), "missing or damaged"),
        ("config.json", lambda text: text.replace('"frames"', '"fremes"'), "fremes, which no part of a drafter has"),
        ("config.json", lambda text: text.replace('"frames": 3', '"frames": "six"'), "frames must be an integer >= 1"),
        ("config.json", lambda text: text.replace('"frames": 3', '"frames": "???"'), "missing or damaged"),
        ("config.json", lambda text: text.replace('"frames": 3,', ""), "missing or damaged"),
        (
            "config.json",
            lambda text: text.replace('"frames": 3', '"frames": 3, "name": "\\u001b[2J"'),
            r"name in .* must be printable, got",
        ),
        ("config.json", lambda text: "[1]", "missing or damaged"),
        ("config.json", lambda text: "[" * 10**5, "missing or damaged"),
        ("model.safetensors", lambda text: "none", "missing or damaged"),
    ],
)
def test_a_damaged_or_foreign_folder_is_refused(home, tmp_path, file, change, sentence):  # noqa: F811
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((home / "head" / name).read_bytes())
    (tmp_path / file).write_text(change((tmp_path / file).read_text(errors="replace")))
    with pytest.raises(InputError, match=sentence):
        PublishedHead.from_pretrained(tmp_path, model=random_lm(), tokenizer=tiny_tokenizer())


def test_a_head_with_old_keys_and_names_is_the_same_head(home, tmp_path):  # noqa: F811
    """config.json as it was written when a tree builder was `paths` and drafters.parallel was drafters.block."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((home / "head" / name).read_bytes())
    text = (tmp_path / "config.json").read_text().replace('"tree"', '"paths"')
    text = text.replace("drafters.parallel.ParallelDrafter", "drafters.block.BlockDrafter")
    text = text.replace("drafters.trees.ctc.PrefixSearch", "drafters.paths.PrefixSearch")
    assert "drafters.paths.PrefixSearch" in text
    (tmp_path / "config.json").write_text(text)
    old = PublishedHead.from_pretrained(tmp_path, model=random_lm(), tokenizer=tiny_tokenizer())
    _, head = loaded(home)
    assert old.config_values == head.config_values


POLICY = {
    "costs": {"nodes": [1, 4, 8], "draft": [0.0, 0.1, 0.1], "rest": [1.0, 1.05, 1.1]},
    "model": [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    "limit_tokens": [1.0, 1.5, 1.7],
    "limit_time": [1.0, 1.05, 1.1],
    "rate": 1.3,
}


def test_a_policy_of_an_evaluation_is_published_and_followed(home, tmp_path):  # noqa: F811
    shutil.copytree(home / "run", tmp_path / "run")
    sizes = tmp_path / "run" / "evaluation" / "tiny-greedy" / "sizes.json"
    stored = {"of": {"contestants": {"ctc_gru": "weights other"}}, "sizes": {"ctc_gru": {"policy": POLICY}}}
    sizes.write_text(json.dumps(stored))
    assert PublishedHead.from_run(tmp_path / "run", random_base()).policy is None
    weights = hashlib.sha256((tmp_path / "run" / "drafter.safetensors").read_bytes()).hexdigest()[:16]
    stored["of"]["contestants"]["ctc_gru"] = f"config 0, weights {weights}"
    sizes.write_text(json.dumps(stored))
    PublishedHead.from_run(tmp_path / "run", random_base()).save_pretrained(tmp_path / "head")
    model, head = loaded(tmp_path)
    drafter, nodes = head.drafter_and_nodes()
    assert (head.nodes, nodes, type(drafter).__name__) == ("adaptive", 8, "AdaptiveDrafter")
    assert drafter.policy.to_json() == AdaptivePolicy.from_json(POLICY).to_json()
    plain = random_lm().generate(PROMPT, **ASKED, do_sample=False)
    assert torch.equal(model.generate(PROMPT, **ASKED, do_sample=False, custom_generate=head.generate), plain)
    head.nodes = 3
    assert head.drafter_and_nodes() == (head.drafter, 3)
    head.save_pretrained(tmp_path / "three" / "head")
    assert loaded(tmp_path / "three")[1].nodes == 3
    _, without = loaded(home)
    without.nodes = "adaptive"
    with pytest.raises(InputError, match="without a policy for adaptive trees"):
        without.drafter_and_nodes()


@pytest.mark.parametrize(
    "change",
    [
        {"rate": "fast"}, {"rate": 0}, {"model": [1.0]},
        {"model": [0, -1e308, 0, 0, 1e308, 0, 1.7e308]}, {"limit_time": [1.0, 1.0, float("nan")]}, {"costs": {}},
        {"costs": POLICY["costs"] | {"nodes": [4, 8, 16]}}, {"costs": POLICY["costs"] | {"draft": 1}},
    ],
)  # fmt: skip
def test_a_damaged_policy_is_refused(home, tmp_path, change):  # noqa: F811
    shutil.copytree(home / "head", tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"policy": POLICY | change}))
    with pytest.raises(InputError, match=r"config.json: the policy of adaptive trees is damaged .*; remove"):
        loaded(tmp_path)


def test_a_run_is_published_from_a_base_with_more_layers_in_another_order(tmp_path):
    from omegaconf import OmegaConf

    from benchmarks.drafter_cases import random_drafter
    from ctcdraft.config.cli import compose_config

    base = BaseLM(random_lm(), tiny_tokenizer(), "random", aux_layers=["last", 0])
    given = ["base=local", "base.path=none", "base.aux_layers=[last,0]", "device=cpu", "drafter=ctc_gru"]
    run = RunDirectory(tmp_path / "run")
    config = OmegaConf.to_yaml(compose_config("train", *given), resolve=True)
    run.create(config, base.fingerprint() | {"corpus": "none"}, overwrite=False)
    run.save_head(random_drafter("ctc_gru", base))
    drafted = []
    for layers in (["last", 0], ["last", 1, 0]):
        model = random_lm()
        head = PublishedHead.from_run(run.path, BaseLM(model, tiny_tokenizer(), "random", aux_layers=layers))
        model.generate(PROMPT, **ASKED, do_sample=False, custom_generate=watching(head, drafted))
    half = len(drafted) // 2
    assert drafted[:half] == drafted[half:]
    assert half > 1


def watching(head, drafted):
    """Return head.generate, which also appends the tokens of every drafted tree."""
    draft = head.drafter.draft

    def watched(*arguments):
        tree, memory = draft(*arguments)
        drafted.append(tree.tokens_N.tolist())
        return tree, memory

    head.drafter.draft = watched
    return head.generate


def test_a_base_that_was_rounded_to_float16_is_not_recognised(home):  # noqa: F811
    with pytest.raises(InputError, match=r"loaded as float16 the base is not recognised .* load it with dtype='bfloat"):
        loaded(home, random_lm().half())


@pytest.mark.parametrize("name", ["dspark", "domino", "peagle"])
def test_heads_of_masks_are_published(name, tmp_path):
    """The same weights from its folder, and the same drafts."""
    from omegaconf import OmegaConf

    from benchmarks.drafter_cases import random_drafter
    from ctcdraft.config.cli import compose_config

    layers = ["last", 0, 1]
    base = BaseLM(random_lm(), tiny_tokenizer(), "random", aux_layers=layers)
    given = ["base=local", "base.path=none", f"base.aux_layers={layers}", "device=cpu", f"drafter={name}"]
    run, drafter = RunDirectory(tmp_path / "run"), random_drafter(name, base)
    config = OmegaConf.to_yaml(compose_config("train", *given), resolve=True)
    run.create(config, base.fingerprint() | {"corpus": "none"}, overwrite=False)
    run.save_head(drafter)
    PublishedHead.from_run(run.path, base).save_pretrained(tmp_path / "head")
    model, head = loaded(tmp_path)
    expected, found = drafter.trainable_state_dict(), head.drafter.trainable_state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    plain = random_lm().generate(PROMPT, **ASKED, do_sample=False)
    assert torch.equal(model.generate(PROMPT, **ASKED, do_sample=False, custom_generate=head.generate), plain)


def test_gpt2_too(tmp_path):
    """A base without Llama's layers, and a head whose run was never evaluated."""
    from functools import partial

    from ctcdraft.drafters.parallel import ParallelDrafter
    from ctcdraft.drafters.trees.ctc import PrefixSearch
    from ctcdraft.nn.bodies import AttentionBody

    model = random_lm("gpt2")
    base = BaseLM(model, tiny_tokenizer(), "gpt2")
    drafter = ParallelDrafter(base, 4, partial(AttentionBody, root_input=True, causal=False), PrefixSearch(16))
    head = PublishedHead(drafter.eval(), base, {"nodes": 8}, "")
    plain = random_lm("gpt2").generate(PROMPT, **ASKED, do_sample=False)
    assert torch.equal(model.generate(PROMPT, **ASKED, do_sample=False, custom_generate=head.generate), plain)
    assert isinstance(model, transformers.GPT2LMHeadModel)
