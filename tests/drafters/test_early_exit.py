"""Early exit: the base's own first layers, against stock transformers and Kangaroo's code."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import transformers
from golden_files import configured_drafter, load_golden, load_mapped
from test_training_equals_decoding import HOW
from tiny_models import random_base, tiny_tokenizer

from ctcdraft.config.build import build_engine
from ctcdraft.config.cli import compose_config
from ctcdraft.decoding.loop import Context, generate
from ctcdraft.distributed import ALONE
from ctcdraft.drafters.early_exit import EarlyExit, Kangaroo
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import TimingStreamer
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.stats import DraftBytes
from ctcdraft.planning.pipelining import pipelined_layer_times, pipelined_speedup

CHAIN = DynamicTree(1, 1)
ROOT_ROW = torch.zeros(1, dtype=torch.int64)
ADAPTER = {  # Kangaroo's names -> ours
    "norm.weight": "norm.weight",
    "layers.0.input_layernorm.weight": "adapter.attention_norm.weight",
    "layers.0.self_attn.q_proj.weight": "adapter.attention.query.weight",
    "layers.0.self_attn.k_proj.weight": "adapter.attention.key.weight",
    "layers.0.self_attn.v_proj.weight": "adapter.attention.value.weight",
    "layers.0.self_attn.o_proj.weight": "adapter.attention.out.weight",
}


def parts_of(golden, prefix):
    return {name.removeprefix(prefix): value.float() for name, value in golden.items() if name.startswith(prefix)}


@torch.inference_mode()
def test_kangaroo_drafts_as_the_authors_code_does():
    golden = load_golden("kangaroo")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, vocab_size=32, max_position_embeddings=64, rope_theta=10000.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    lm = transformers.LlamaForCausalLM(config)
    lm.load_state_dict(parts_of(golden, "base."))
    base = BaseLM(lm, tiny_tokenizer(), "golden")
    base.stop_token_ids = frozenset()
    drafter = configured_drafter("kangaroo", base, "drafter.layers=1").eval()
    load_mapped(drafter, parts_of(golden, "adapter."), ADAPTER)

    tokens, states = golden["tokens"], torch.zeros(11, 16)
    tree, memory = drafter.draft(Context(tokens, states, 30, 16), None, torch.Generator())
    assert tree.tokens_N[1:].tolist() == golden["draft"].tolist()
    logits = drafter.head(drafter.text_states(tokens[None], torch.arange(len(tokens))[None]))[0]
    assert torch.allclose(logits, golden["logits"], atol=1e-5)
    # The same after other texts were drafted for, token by token.
    for end in range(1, len(tokens) + 1):
        context = Context(tokens[:end], states, 30, 16)
        found = drafter.step_function(context, None if end == 1 else memory)
        assert torch.allclose(
            found(tokens[end - 1 : end], ROOT_ROW)[0], golden["logits"][end - 1].log_softmax(-1), atol=1e-5
        )
        memory = found.release()


@pytest.mark.parametrize(("kind", "layers"), [("llama", 1), ("llama", 3), ("qwen3", 0.5), ("gpt2", 0.6)])
@torch.inference_mode()
def test_early_exit_has_the_logits_of_a_stock_model_with_fewer_layers(kind, layers):
    changes = {"num_hidden_layers": 4}
    base = random_base(kind, **changes)
    drafter = EarlyExit(base, layers, 4, CHAIN).eval()
    count = layers if isinstance(layers, int) else 2
    assert (drafter.lm.layers, base.layers) == (count, 4)
    stock = random_base(kind, **{**changes, "num_hidden_layers": count}).lm
    stock.load_state_dict({name: value for name, value in base.lm.state_dict().items() if name in stock.state_dict()})
    tokens = torch.randint(5, 200, (9,), generator=torch.Generator().manual_seed(1))
    expected = stock(tokens[None]).logits[0, -1].log_softmax(-1)
    found = drafter.step_function(Context(tokens, torch.zeros(8, 32), 30, 16), None)(tokens[-1:], ROOT_ROW)[0]
    assert torch.allclose(found, expected, atol=1e-5)


def test_early_exit_takes_the_steps_of_stock_assisted_generation():
    """`assistant_early_exit` of transformers drafts with the first layers, too."""
    base = random_base(context=128, num_hidden_layers=4, initializer_range=0.1)
    prompt, decoding = torch.tensor([0, 7, 9, 30, 7, 9, 30, 7]), replace(HOW, max_new_tokens=60)
    streamer, how = TimingStreamer(), base.lm.generation_config
    how.num_assistant_tokens, how.num_assistant_tokens_schedule = 4, "constant"
    how.assistant_confidence_threshold = 0.0
    base.lm.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], max_new_tokens=60, do_sample=False,
        eos_token_id=None, pad_token_id=1, streamer=streamer, assistant_early_exit=3,
    )  # fmt: skip
    first, *committed = streamer.committed[1:]  # after the prompt
    later = torch.cat([prompt, torch.tensor(first[:-1], dtype=torch.int64)])
    ours = EarlyExit(base, 3, 4, CHAIN).eval()
    result = generate(base, ours, later, replace(decoding, max_new_tokens=60 - len(first) + 1), frozenset(), 0)
    assert [step.committed for step in result.passes] == list(map(len, committed))
    assert 1 < sum(step.accepted for step in result.passes) < sum(step.drafted for step in result.passes)


def test_the_layers_are_the_bases_own_and_stay_so_in_a_copy():
    base = random_base()
    layer = sum(weight.numel() for weight in base.lm.model.layers[0].parameters())
    for drafter, own in (
        (EarlyExit(base, 1, 4, CHAIN), 0),
        (Kangaroo(base, 1, 4, CHAIN, mlp=True, like_base=True), layer + 32),  # a layer and a norm
    ):
        read = DraftBytes.of(drafter, base)
        assert read.body == 4 * (layer + own + (0 if own else 32))  # without an adapter, the base's norm
        assert read.vocabulary == 4 * 261 * 32
        drafter.to(torch.float64)  # as an inference does, in the base's dtype
        assert base.lm.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
        base.head.float()
        drafter.float()
        copied, theirs = deepcopy((base, drafter))  # as the losslessness check copies both into float64
        for lm, whole in ((drafter.lm.lm, base.lm), (theirs.lm.lm, copied.lm)):
            assert list(lm.model.layers) == list(whole.model.layers[:1])
            assert lm.lm_head is whole.lm_head
        assert len(base.lm.model.layers) == base.lm.config.num_hidden_layers == 2
        assert not set(map(id, base.parameters())) & set(map(id, drafter.trainable_parameters()))
    assert EarlyExit(base, 1, 4, CHAIN).trainable_state_dict() == {}


@pytest.mark.parametrize("layers", [0, 2, 1.5, True, "all"])
def test_impossible_numbers_of_layers_are_refused(layers):
    with pytest.raises(InputError, match=r"drafter\.layers must be an integer from 1 to 1 or a fraction"):
        EarlyExit(random_base(), layers, 4, CHAIN)


def test_what_cannot_be_run_or_trained_is_refused():
    base = random_base("opt", without=("intermediate_size", "num_key_value_heads", "head_dim"), word_embed_proj_dim=32)
    with pytest.raises(InputError, match="layers and final norm of random-opt are not known among decoder"):
        EarlyExit(base, 1, 4, CHAIN)
    config = compose_config("train", "drafter=early_exit")
    with pytest.raises(InputError, match=r"drafter=early_exit has no weights to train; use it as it is: evaluate\.py"):
        build_engine(config, EarlyExit(random_base(), 1, 4, CHAIN), ALONE)


def test_the_pipelined_schedule_by_hand():
    """Four layers, predicted after one. The second token begins at 1, the third at 1 + 4, the fourth at 6."""
    assert pipelined_layer_times([True, False, True], 4, 1) == 10
    assert pipelined_layer_times([False] * 3, 4, 1) == pipelined_layer_times([True] * 3, 4, 4) == 16
    assert pipelined_layer_times([], 4, 1) == 4
    assert pipelined_speedup(0.5, 4, 1) == pytest.approx(4 / 2.5)
    assert pipelined_speedup(0.5, 4, 1, layer_time=1.25) == pytest.approx(4 / 2.5 / 1.25)
    many = [token % 4 > 0 for token in range(4000)]
    assert pipelined_speedup(0.75, 32, 8) == pytest.approx(32 * 4001 / pipelined_layer_times(many, 32, 8), rel=1e-3)
    with pytest.raises(InputError, match="exit_layer must be a number <= 4, got 5"):
        pipelined_speedup(0.5, 4, 5)
