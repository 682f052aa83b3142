"""Tiny base models with random weights and a byte-level tokenizer, built in seconds without network or files."""

from __future__ import annotations

from collections.abc import Collection

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ctcdraft.models.base_model import BaseLM

SPECIAL_TOKENS = ["<bos>", "<pad>", "<|user|>", "<|assistant|>", "<|end|>"]
EOS_ID = SPECIAL_TOKENS.index("<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level tokenizer without merges: 5 special tokens and 256 bytes, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", pad_token="<pad>", eos_token="<|end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def random_lm(
    kind: str = "llama",
    seed: int = 0,
    vocabulary: int = 261,
    context: int = 256,
    attention: str = "sdpa",
    without: Collection[str] = (),
    **changes,
):
    """Return a random causal LM of a stock architecture with two layers of width 32.

    Its weights have a large spread, so that the top-2 margin of the logits is far above rounding errors.

    Args:
        without: sizes that the config of this architecture lacks.
        changes: other values of the config.
    """
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": context,
        "vocab_size": vocabulary,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": EOS_ID,
    }
    without = {*without, *(("intermediate_size", "num_key_value_heads", "head_dim") if kind == "gpt2" else ())}
    shape = {name: value for name, value in shape.items() if name not in without}
    config = transformers.AutoConfig.for_model(kind, **{**shape, **changes})
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def random_base(kind: str = "llama", seed: int = 0, **changes) -> BaseLM:
    return BaseLM(random_lm(kind, seed, **changes), tiny_tokenizer(), f"random-{kind}")
