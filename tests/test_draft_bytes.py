"""The lower bound of c from bytes, against bytes counted by hand."""

import pytest
import torch
from tiny_models import random_base
from training_parts import ctc_head
from transformers import DynamicCache

from benchmarks.drafter_cases import random_drafter
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.eagle3 import Eagle3
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.trees.dynamic import DynamicTree
from ctcdraft.evaluation.environment import count_matmul_weights, weight_bytes
from ctcdraft.models.meta import build_meta_base
from ctcdraft.models.stats import DraftBytes, ModelStats
from ctcdraft.planning.training import describe_draft_bytes

LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
TABLE = 128256 * 4096


@pytest.fixture(scope="module")
def llama():
    return build_meta_base("llama3", "bfloat16", config=LLAMA3)


def test_medusa_on_llama_3_by_hand(llama):
    with torch.device("meta"):
        read = DraftBytes.of(random_drafter("medusa", llama), llama)
    assert read.base == 2 * (32 * LAYER + 4096 + TABLE)
    assert read.body == 2 * 4 * (4096 * 4096 + 4096)  # four heads, with biases
    assert read.head == read.correction == 0
    assert read.vocabulary == 4 * 2 * TABLE  # an lm_head of its own for each
    assert read.vocabulary / read.base == pytest.approx(0.280, abs=5e-4)
    assert read.least_c == (read.body + read.head + read.vocabulary) / read.base


def test_the_plan_advises_a_draft_vocabulary_where_its_rows_are_many(llama):
    with torch.device("meta"):
        (line,) = describe_draft_bytes(random_drafter("medusa", llama), llama)
    assert "vocabulary 4.2 GB) where a step of the base reads 15.0 GB: c >= 0.289" in line
    assert line.endswith("the vocabulary alone is 0.280, of which drafter.vocabulary= reads less")


def test_a_gru_and_a_draft_vocabulary_by_hand():
    base = random_base()  # float32, V 261, D 32, not tied
    whole = random_drafter("ctc_gru", base)
    gru = 192 * 32 + 192 * 64 + 2 * 192 + (64 * 32 + 64) + 32  # cell, first memory, norm of the embedding
    read = DraftBytes.of(whole, base)
    assert read.correction == 4 * (gru + 261 * 64)
    assert read.vocabulary == 4 * 261 * 32
    small = ctc_head(base)
    plain = DraftBytes.of(small, base)
    small.head = type(small.head)(base.head, base.width, vocabulary=61)
    fewer = DraftBytes.of(small, base)
    assert (fewer.vocabulary, fewer.body, fewer.base) == (4 * 61 * 32, plain.body, plain.base)


@pytest.mark.parametrize("vocabulary", [None, 61])
def test_an_lm_head_of_its_own_replaces_that_of_the_base(vocabulary):
    base = random_base()
    own, shared = (DraftBytes.of(eagle3_head(base, vocabulary, own_head), base) for own_head in (True, False))
    assert own == shared
    assert own.vocabulary == 4 * (vocabulary or 261) * 32


def eagle3_head(base, vocabulary, own_head):
    return Eagle3(base, 3, DynamicTree(3, 4), vocabulary, own_head, False, False, True)


def test_a_tied_lm_head_counts_once_and_quantised_bytes_are_given():
    base = random_base(tie_word_embeddings=True)
    read = DraftBytes.of(ctc_head(base), base)
    assert read.vocabulary == 4 * 261 * 32
    values = {id(weight): weight.numel() for weight in base.lm.parameters()}
    assert read.base == 4 * sum(values.values())
    assert DraftBytes.of(ctc_head(base), base, base_bytes=1000).least_c == read.total / 1000


def test_drafters_without_weights_have_none():
    base = random_base()
    assert DraftBytes.of(Autoregressive(base), base) is None
    assert DraftBytes.of(PromptLookup(base, 2, 4), base) is None


def test_a_drafter_may_have_scalars_and_as_wide_a_layer_as_the_vocabulary():
    base = random_base()
    drafter = ctc_head(base)
    drafter.head = type(drafter.head)(base.head, base.width, vocabulary=61)
    before = DraftBytes.of(drafter, base)
    drafter.body.scale = torch.nn.Parameter(torch.tensor(1.0))
    drafter.body.wide = torch.nn.Linear(32, 261, bias=False)
    after = DraftBytes.of(drafter, base)
    assert after.body - before.body == 4 * (1 + 261 * 32)
    assert (after.vocabulary, after.head) == (before.vocabulary, before.head)


def test_of_a_mixture_the_experts_of_one_token_are_read():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64}
    base = build_meta_base("moe", "float32", config={"model_type": "qwen3_moe", **sizes, **experts})
    size, idle = ModelStats.of(base), 2 * 6 * 3 * 64 * 32  # layers, experts, matrices
    assert size.parameters - size.body - size.head - base.embedding.weight.numel() == idle
    assert size.weight_bytes == 4 * size.parameters
    assert weight_bytes(base) == 4 * (size.body + size.head)
    assert count_matmul_weights(base) == size.body + size.head


def test_compressed_keys_and_values_are_counted_as_they_are_cached():
    config = {
        "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 32, "intermediate_size": 64, "vocab_size": 128,
    }  # fmt: skip
    base = build_meta_base("mla", "float32", config=config)
    cache = DynamicCache(config=base.lm.config)
    base.lm(torch.zeros(1, 3, dtype=torch.long, device="meta"), past_key_values=cache)
    cached = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    assert ModelStats.of(base).kv_bytes == cached / 3
