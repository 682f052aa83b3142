"""Golden tensors of the parallel drafters, by their reference implementations with small random weights; see README.md.

python tests/golden/make_parallel.py dflash                    # transformers 5.23
python tests/golden/make_parallel.py dspark peagle             # speculators 0.9.0
python tests/golden/make_parallel.py domino --automodel FOLDER # a checkout of NVIDIA-NeMo/Automodel
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY, WIDTH, FRAMES, TEXT = 16, 8, 3, 9
SHAPE = {
    "hidden_size": WIDTH, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
MASK = VOCABULARY - 1


def draw(model: Any) -> None:
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)


def inputs() -> dict[str, Tensor]:
    """Return two auxiliary layers of a text, its tokens (the last one the root), an embedding and an lm_head."""
    return {
        "layers": torch.randn(1, TEXT, 2 * WIDTH),
        "tokens": torch.randint(MASK, (1, TEXT + 1)),
        "embedding": torch.randn(VOCABULARY, WIDTH),
        "lm_head": torch.randn(VOCABULARY, WIDTH),
    }


def dflash(folder: Path) -> dict[str, Tensor]:
    config = transformers.MuseGlimmerAssistantConfig(
        **SHAPE, layer_types=["full_attention"] * 2, block_size=FRAMES + 1, mask_token_id=MASK, target_layer_ids=[0, 1]
    )
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    draw(model)
    given = inputs()
    embedding = torch.nn.Embedding.from_pretrained(given["embedding"])
    lm_head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    lm_head.weight.data = given["lm_head"]
    settings = SimpleNamespace(max_length=64, do_sample=False)
    generator = transformers.generation.DFlashTokenCandidateGenerator(model, embedding, lm_head, settings)
    # The prompt and its first token; then two draft tokens were accepted, and another one followed.
    results, first = {}, TEXT - 3
    for name, start, end in (("first", 0, first), ("second", first, TEXT)):
        layers = given["layers"][:, start:end].split(WIDTH, dim=-1)
        candidates, logits = generator.get_candidates(
            given["tokens"][:, : end + 1],
            {"position_ids": torch.arange(end + 1)[None], "attention_mask": torch.ones(1, end + 1)},
            SimpleNamespace(hidden_states=[None, *layers]),
            is_first_iteration=False,
            n_last_matches=end - start - 1,
        )
        results |= {f"{name}_logits": logits[0], f"{name}_draft": candidates[0, end + 1 :]}
    return {**model.state_dict(), **given, **results}


def with_heads(model: Any, given: dict[str, Tensor]) -> Any:
    draw(model)
    model.embed_tokens.weight.data = given["embedding"].clone()
    model.lm_head.weight.data = given["lm_head"].clone()
    model.verifier_lm_head.weight.data = given["lm_head"].clone()
    return model.eval()


def weights(model: Any) -> dict[str, Tensor]:
    frozen = ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")
    return {name: value for name, value in model.state_dict().items() if name.split(".")[0] not in frozen}


def backbone(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return hidden states and logits of the block that begins with the root."""
    root = given["tokens"].shape[1] - 1
    layers = torch.cat([given["layers"], torch.zeros(1, 1 + FRAMES, 2 * WIDTH)], dim=1)
    tokens = torch.cat([given["tokens"], torch.zeros(1, FRAMES, dtype=torch.long)], dim=1)
    loss_mask = (torch.arange(layers.shape[1]) == root)[None].float()
    last = torch.zeros(1, layers.shape[1], WIDTH)
    hidden, logits, *_ = model._backbone_forward(
        layers, tokens, loss_mask, last, torch.zeros_like(tokens), max_anchors=1
    )
    return hidden[0], logits[0]


def dspark(folder: Path) -> dict[str, Tensor]:
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    config = DSparkSpeculatorConfig(
        transformer_layer_config=transformers.Qwen3Config(**SHAPE, vocab_size=VOCABULARY, attn_implementation="eager"),
        draft_vocab_size=VOCABULARY, block_size=FRAMES, aux_hidden_state_layer_ids=[0, 1], mask_token_id=MASK,
        markov_rank=4, enable_confidence_head=False,
    )  # fmt: skip
    given = inputs()
    model = with_heads(DSparkDraftModel(config), given)
    hidden, logits = backbone(model, given)
    token, draft, corrected = given["tokens"][:, -1:], [], []
    for frame in range(FRAMES):  # from left to right, each frame after the token before it
        bias = model.markov_head.block_bias(prev_token_ids=token, hidden_states=hidden[None, frame : frame + 1])
        corrected.append(logits[frame] + bias[0, 0])
        token = corrected[-1].argmax()[None, None]
        draft.append(token[0, 0])
    return {**weights(model), **given, "logits": torch.stack(corrected), "draft": torch.stack(draft)}


def peagle(folder: Path) -> dict[str, Tensor]:
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core

    config = PEagleSpeculatorConfig(
        transformer_layer_config=transformers.LlamaConfig(**SHAPE, vocab_size=VOCABULARY, attn_implementation="eager"),
        draft_vocab_size=VOCABULARY, eagle_aux_hidden_state_layer_ids=[0, 1], mask_token_id=MASK,
    )  # fmt: skip
    given = inputs()
    model = with_heads(PEagleDraftModel(config), given)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    # All of the text, and the masks of the last anchor alone: training would choose rollouts at random.
    rows = torch.arange(TEXT + FRAMES - 1)
    core.generate_cod_sample_indices = lambda **unused: (rows.clamp(max=TEXT - 1), (rows - TEXT + 1).clamp(min=0))
    padding = torch.zeros(1, FRAMES - 1, 2 * WIDTH)
    after = torch.cat([given["tokens"][:, 1:], padding[..., 0].long()], dim=1)
    model(
        torch.cat([given["layers"], padding], dim=1), after, torch.zeros_like(after),
        verifier_last_hidden_states=torch.zeros(1, len(rows), WIDTH), num_depths=FRAMES,
        loss_config={"none": (lambda logits, targets: logits.sum(dim=-1) * 0, 1.0)},
    )  # fmt: skip
    logits = seen[0][0, TEXT - 1 :]
    return {**weights(model), **given, "logits": logits, "draft": logits.argmax(dim=-1)}


def domino(folder: Path) -> dict[str, Tensor]:
    sys.path.insert(0, str(folder))
    from nemo_automodel.components.speculative.dflash.domino_core import DominoTrainerModule
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel

    config = transformers.Qwen3Config(**SHAPE, vocab_size=VOCABULARY, attn_implementation="eager")
    config.num_target_layers, config.block_size = 2, FRAMES
    config.dflash_config = {
        "mask_token_id": MASK, "target_layer_ids": [0, 1], "projector_type": "domino", "emb_dim": 4,
        "gru_hidden_dim": 6, "pure_draft_prefix_len": 1, "shift_label": True,
    }  # fmt: skip
    model = Qwen3DFlashDraftModel(config).eval()
    draw(model)
    given = inputs()
    embedding = torch.nn.Embedding.from_pretrained(given["embedding"])
    block = torch.full((1, FRAMES), MASK)
    block[:, 0] = given["tokens"][:, -1]
    positions = torch.arange(TEXT + FRAMES)[None]
    hidden = model(positions, noise_embedding=embedding(block), target_hidden=given["layers"])
    logits = hidden @ given["lm_head"].T
    module = DominoTrainerModule.__new__(DominoTrainerModule)
    torch.nn.Module.__init__(module)
    module.draft_model, module.embed_tokens, module.shift_label = model, embedding, True
    before, draft = block[None].clone(), []
    for frame in range(FRAMES):  # the head over the tokens so far; what follows them does not matter
        corrected = module._apply_domino_head(logits[None], hidden[None], before, before)[0, 0]
        draft.append(corrected[frame].argmax())
        if frame + 1 < FRAMES:
            before[0, 0, frame + 1] = draft[-1]
    return {**model.state_dict(), **given, "logits": corrected, "draft": torch.stack(draft)}


# Per method: source, version or commit, what was run. All are under Apache-2.0.
SOURCES = {
    "dflash": ("transformers", "5.23.0", "DFlashTokenCandidateGenerator over MuseGlimmerAssistantModel"),
    "dspark": ("speculators", "0.9.0", "DSparkDraftModel without its confidence head, tokens from left to right"),
    "peagle": ("speculators", "0.9.0", "the training forward of PEagleDraftModel"),
    "domino": (
        "github.com/NVIDIA-NeMo/Automodel", "36044ad3d139363fb6c73c24af2e7c6b65ec52f6",
        "Qwen3DFlashDraftModel and the head of DominoTrainerModule, tokens from left to right",
    ),
}  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="+", choices=sorted(SOURCES))
    parser.add_argument("--automodel", type=Path, default=Path())
    arguments = parser.parse_args()
    for name in arguments.methods:
        torch.manual_seed(0)
        tensors = {key: value.contiguous() for key, value in globals()[name](arguments.automodel).items()}
        file = Path(__file__).with_name(f"{name}.safetensors")
        source, version, run = SOURCES[name]
        save_file(tensors, file, {"source": source, "commit": version, "license": "Apache-2.0", "run": run})
        print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
