"""Tiny random models of every architecture in docs/served_bases.md, supported or refused."""

from __future__ import annotations

from tiny_models import random_lm, tiny_tokenizer

CONTEXT = 96
WINDOW = 20  # shorter than any prompt of these tests, and so than the context
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
SPARSE = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
SLIDES = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0}
LONG = ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}

# Row of the page -> model_type and values of its tiny config; "attention" where the architecture has no sdpa.
SERVED = {
    "Llama 1, 2": ("llama", {}),
    "Llama 3.1 and later (scaled rotary positions)": ("llama", {"rope_parameters": LLAMA3}),
    "any with YaRN rotary positions": ("llama", {"rope_parameters": YARN}),
    "Mistral, window as long as the context": ("mistral", {"sliding_window": CONTEXT}),
    "Mistral, window shorter than the context": ("mistral", {"sliding_window": WINDOW}),
    "Mixtral": ("mixtral", {"sliding_window": WINDOW}),
    "Qwen 2, 2.5": ("qwen2", {}),
    "Qwen 2, 2.5 with use_sliding_window": ("qwen2", SLIDES),
    "Qwen 3": ("qwen3", SLIDES),
    "Qwen 2 MoE": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 16}),
    "Qwen 3 MoE": ("qwen3_moe", MOE),
    "Phi 1, 2": ("phi", {}),
    "Phi 3, 4 (default rotary positions)": ("phi3", {"sliding_window": WINDOW}),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "OLMoE": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Gemma 1": ("gemma", {}),
    "Gemma 3, text only": ("gemma3_text", {"sliding_window": WINDOW, "num_hidden_layers": 6}),
    "SmolLM 1, 2": ("llama", {"tie_word_embeddings": True}),
    "SmolLM 3": ("smollm3", {"num_hidden_layers": 4}),
    "Granite, logits_scaling of 1": (
        "granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7}
    ),
    "StableLM": ("stablelm", {"head_dim": None}),
    "GPT-NeoX, Pythia": ("gpt_neox", {}),
    "GPT-2": ("gpt2", {}),
    "GPT-OSS, attention=eager": (
        "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "attention": "eager"}
    ),
    "DeepSeek V3": ("deepseek_v3", {**MLA, **SPARSE, "moe_intermediate_size": 16, "num_experts_per_tok": 2}),
    "StarCoder 2": ("starcoder2", {"sliding_window": WINDOW}),
    "GLM 4": ("glm4", {}),
    "Nemotron": ("nemotron", {}),
    "Helium": ("helium", {}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "Seed-OSS": ("seed_oss", {}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}  # fmt: skip
# Row of the page -> model_type, config, and a part of the error message.
REFUSED = {
    "Gemma 2": ("gemma2", {"attention": "eager"}, "final_logit_softcapping=30.0: its logits are scaled"),
    "Granite, any other logits_scaling": ("granite", {"logits_scaling": 8.0}, "logits_scaling=8.0: its logits are"),
    "Cohere, Command R": ("cohere", {}, "logit_scale=0.0625: its logits are scaled"),
    "Cohere 2, Command R7B": ("cohere2", {"sliding_window": WINDOW}, "logit_scale=0.0625: its logits are scaled"),
    "Phi 3 with 128k tokens (longrope)": ("phi3", {"rope_parameters": LONG}, "longrope rotary positions"),
    "any with dynamic rotary positions": (
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "dynamic rotary"
    ),
    "Llama 4, text only": (
        "llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 20,
                        "num_hidden_layers": 4}, "chunked_attention"
    ),
    "Mamba": ("mamba", {"attention": "eager"}, "no attention heads"),
    "GPT-Neo": (
        "gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8,
                    "attention": "eager"}, "computes other logits"
    ),
    "BLOOM": ("bloom", {"n_layer": 2, "n_head": 4, "attention": "eager"}, "read a token tree|computes other logits"),
}  # fmt: skip
# Sizes that these configs lack, or that mean something else there.
UNKNOWN = {
    "gpt2": ("intermediate_size", "num_key_value_heads", "head_dim"),
    "opt": ("intermediate_size", "num_key_value_heads", "head_dim"),
    "bloom": ("intermediate_size", "num_key_value_heads", "head_dim", "num_hidden_layers", "num_attention_heads"),
    "gpt_neo": ("intermediate_size", "num_key_value_heads", "head_dim", "num_hidden_layers", "num_attention_heads"),
    "gpt_neox": ("num_key_value_heads", "head_dim"),
    "phi": ("num_key_value_heads", "head_dim"),
    "stablelm": ("head_dim",),
    "mamba": ("num_key_value_heads", "head_dim", "num_attention_heads"),
    "deepseek_v3": ("num_key_value_heads", "head_dim"),
}


def tiny_checkpoint(folder, kind, changes):
    """Save a random model of this architecture; return its folder and the attention to load it with."""
    changes = {"tie_word_embeddings": False, **({"num_key_value_heads": 4} if kind == "deepseek_v3" else {}), **changes}
    attention = changes.pop("attention", "sdpa")
    without = (*UNKNOWN.get(kind, ()), *(name for name, value in changes.items() if value is None))
    given = {name: value for name, value in changes.items() if value is not None}
    random_lm(kind, context=CONTEXT, attention=attention, without=without, **given).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder), attention
