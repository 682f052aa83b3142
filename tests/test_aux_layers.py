"""Heads that read different layers of one base are evaluated together, and each drafts what it drafts alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tiny_models import random_base, random_lm, tiny_tokenizer

from ctcdraft.config.cli import compose_config
from ctcdraft.config.contestants import build_contestant, load_base, resolve_contestants
from ctcdraft.config.drafters import build_drafter
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.verification import match
from ctcdraft.errors import InputError
from ctcdraft.hub import PublishedHead
from ctcdraft.models.aux_layers import resolve_aux_layers, view_of_layers
from ctcdraft.models.base_model import BaseLM
from ctcdraft.training.run_directory import RunDirectory

HEADS = {
    "all": ["drafter=ctc", "drafter.frames=3", "base.aux_layers=[last,1,0]", "drafter.body.own_text=true"],
    "other": ["drafter=ctc", "drafter.frames=3", "base.aux_layers=[last,1]"],
    "reverse": ["drafter=ctc", "drafter.frames=3", "base.aux_layers=[last,0,1]", "drafter.body.own_text=true"],
    "default": ["drafter.frames=3"],  # fractions of the base's layers
    "last": ["drafter=medusa", "drafter/tree=per_frame", "base.aux_layers=[last]"],
    "eagle": ["drafter=eagle", "base.aux_layers=[last]"],
    "eagle3": ["drafter=eagle3", "drafter.frames=3", "base.aux_layers=[last,1,0]"],
}


@pytest.mark.parametrize(
    "aux_layers",
    [
        [],
        ["first"],
        [1],
        ["last", "last"],
        ["last", 2],
        ["last", -1],
        ["last", 1.0],
        ["last", 0.0],
        ["last", True],
        4,
        None,
        "last",
    ],
)
def test_wrong_auxiliary_layers_are_input_errors(aux_layers):
    base = random_base()
    sentence = r"base\.aux_layers must be .*layers from 0 to 1 or fractions of them, as in \[last,1\]"
    with pytest.raises(InputError, match=sentence):
        BaseLM(base.lm, base.tokenizer, "x", aux_layers=aux_layers)


@pytest.mark.parametrize(("layers", "expected"), [(2, [0, 1]), (18, [4, 11]), (32, [7, 20]), (36, [8, 22])])
def test_fractions_name_layers_of_a_base_of_any_depth(layers, expected):
    assert resolve_aux_layers(["last", 0.22, 0.61], layers) == ["last", *expected]


def test_a_view_is_the_base_where_nothing_differs_or_a_layer_is_absent():
    base = random_base()
    assert view_of_layers(base, ["last"]) is base
    assert view_of_layers(base, ["last", 1]) is base
    several = BaseLM(base.lm, base.tokenizer, "x", aux_layers=["last", 1, 0])
    view = view_of_layers(several, ["last", 0])
    assert (view.fingerprint()["taps"], several.fingerprint()["taps"]) == (["last", 0], ["last", 1, 0])
    assert view.state_columns.tolist() == [*range(base.width), *range(2 * base.width, 3 * base.width)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run directories of untrained heads, one of them also as a published head, and the base of each."""
    home = tmp_path_factory.mktemp("runs")
    random_lm().save_pretrained(home / "base")
    tiny_tokenizer().save_pretrained(home / "base")
    for number, (name, overrides) in enumerate(HEADS.items()):
        config = compose_config("train", "base=local", f"base.path={home / 'base'}", "device=cpu", *overrides)
        base = instantiate(config.base, _convert_="all").for_inference()
        torch.manual_seed(number)
        run = RunDirectory(home / name)
        run.create(OmegaConf.to_yaml(config, resolve=True), base.fingerprint() | {"corpus": "none"}, overwrite=False)
        drafter = build_drafter(config.drafter, base)
        with torch.no_grad():  # the maps of auxiliary layers begin with zeros, so that no column would matter
            for weight in drafter.trainable_parameters():
                weight += 0.3 * torch.randn_like(weight)
        run.save_head(drafter)
        PublishedHead.from_run(run.path, base).save_pretrained(home / f"published_{name}")
    return home


def built(home, *names):
    config = compose_config(
        "evaluate", f"contestants=[{','.join(str(home / name) for name in names)}]", "device=cpu", "base=local",
        f"base.path={home / 'base'}",
    )  # fmt: skip
    entries = resolve_contestants(config)
    base = load_base(config, entries)
    return base, {entry.run.name: build_contestant(entry, base) for entry in entries.values() if entry.run is not None}


@torch.inference_mode()
def test_together_every_head_drafts_what_it_drafts_alone(runs):
    base, together = built(
        runs, "last", "published_other", "all", "eagle", "published_last", "reverse", "default", "published_eagle3"
    )
    assert base.aux_layers[0] == "last"
    assert sorted(base.aux_layers[1:]) == [0, 1]
    settings = DecodingSettings(24, 8, 0.0, 0, 1.0, match, lossless=True)
    drafted = set()
    for name, contestant in together.items():
        alone_base, alone = built(runs, name)
        assert (len(alone_base.aux_layers) < 3) == (name not in ("all", "reverse", "default", "published_eagle3"))
        assert alone[name].identity == contestant.identity
        for text in ([5, 6, 7, 8], [9, 3, 3, 4, 11]):
            ours, theirs = (
                generate(on, one.drafter, torch.tensor(text), settings, set(), 0)
                for on, one in ((base, contestant), (alone_base, alone[name]))
            )
            assert ours.tokens == theirs.tokens
            assert ours.passes == theirs.passes
            drafted |= {name} if any(step.nodes > 1 for step in ours.passes) else set()
    assert drafted == set(together)


def test_a_head_that_would_read_the_columns_of_others_is_refused(runs, monkeypatch):
    monkeypatch.setattr("ctcdraft.models.aux_layers.hasattr", lambda one, name: False, raising=False)
    assert built(runs, "other")[1]
    assert built(runs, "all", "eagle")[1]  # it reads the last layer alone
    with pytest.raises(InputError, match="has no state_columns, so that ParallelDrafter cannot share a base"):
        built(runs, "other", "all")
    with pytest.raises(InputError, match="has no state_columns"):
        built(runs, "published_other", "all")


def test_a_head_without_its_layers_is_refused(runs):
    entries = resolve_contestants(compose_config("evaluate", f"contestants=[{runs / 'all'}]"))
    with pytest.raises(InputError, match=r"load it with aux_layers=\['last', 1, 0\]"):
        build_contestant(entries["ctc"], random_base())


SMALL = {"vocab_size": 128, "eos_token_id": 1, "bos_token_id": 0, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("architecture", "sizes", "hooks"),
    [
        ("llama", WIDE, 3),
        ("gemma3_text", WIDE, 3),
        ("mixtral", {**WIDE, **EXPERTS}, 3),
        ("gpt2", {"n_embd": 64}, 3),
        ("gpt_neox", {"hidden_size": 64, "intermediate_size": 64}, 3),
        ("opt", {"hidden_size": 64, "ffn_dim": 64, "word_embed_proj_dim": 64}, 0),  # its layers are deeper inside
    ],
)
def test_recorded_inputs_of_layers_are_the_hidden_states_of_transformers(architecture, sizes, hooks):
    config = transformers.AutoConfig.for_model(architecture, **{**SMALL, **sizes})
    lm = transformers.AutoModelForCausalLM.from_config(config).eval()
    base = BaseLM(lm, None, architecture, aux_layers=["last", 2, 0, 1])
    BaseLM(lm, None, architecture, aux_layers=["last", 1])  # as of another head on the same model
    # A hook makes every forward pass slower, also autoregression's; transformers would leave one on every layer.
    assert sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in lm.modules()) == hooks
    tokens_BL = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    states_BLD = base.hidden_states(tokens_BL, torch.ones_like(tokens_BL))
    output = lm.base_model(tokens_BL, output_hidden_states=True)
    expected_BLD = torch.cat([output.last_hidden_state, *(output.hidden_states[n] for n in (2, 0, 1))], dim=-1)
    assert torch.equal(states_BLD, expected_BLD)
    assert base.layer_inputs is None or not base.layer_inputs.by_thread  # nothing is kept, also of the model's own use


def test_threads_record_layers_apart():
    """Training reads the next batch in a thread while a validation decodes."""
    base = BaseLM(random_lm(), None, "base", aux_layers=["last", 1])
    tokens_TL = torch.randint(5, 20, (40, 12), generator=torch.Generator().manual_seed(0))
    expected = [base.hidden_states(row[None], torch.ones_like(row[None])) for row in tokens_TL]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda row: base.hidden_states(row[None], torch.ones_like(row[None])), tokens_TL)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("compiled", ["inner", "layers", "forward"])
def test_a_model_that_its_user_compiled_has_the_same_hidden_states(compiled):
    base = BaseLM(random_lm(), None, "base", aux_layers=["last", 1])
    tokens_BL = torch.arange(5, 17)[None]
    expected_BLD = base.hidden_states(tokens_BL, torch.ones_like(tokens_BL))
    inner = base.lm.base_model
    for module in {"inner": [inner], "layers": inner.layers, "forward": []}[compiled]:
        module.compile(backend="eager")
    if compiled == "forward":
        inner.forward = torch.compile(inner.forward, backend="eager")
    assert torch.equal(base.hidden_states(tokens_BL, torch.ones_like(tokens_BL)), expected_BLD)
