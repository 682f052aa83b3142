"""Golden tensors of EAGLE, Medusa and Hydra, by their reference implementations with small random weights.

python tests/golden/make_sequential.py eagle eagle3 --eagle FOLDER    # a checkout of SafeAILab/EAGLE
python tests/golden/make_sequential.py eagle3_1                       # speculators 0.9.0
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

VOCABULARY, DRAFTED, WIDTH, FRAMES, TEXT = 16, 12, 8, 3, 9
SHAPE = {
    "hidden_size": WIDTH, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY, "pad_token_id": 0,
}  # fmt: skip
OLD_NAMES = {"rope_theta": 10_000.0, "rope_scaling": None, "hidden_act": "silu", "pretraining_tp": 1}


def draw(model: Any) -> None:
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)


def inputs(layers: int) -> dict[str, Tensor]:
    """Return hidden states of a text, its tokens (the last one the root), an embedding and an lm_head."""
    return {
        "layers": torch.randn(1, TEXT, layers * WIDTH),
        "tokens": torch.randint(1, VOCABULARY, (1, TEXT + 1)),
        "embedding": torch.randn(VOCABULARY, WIDTH),
        "lm_head": torch.randn(VOCABULARY, WIDTH),
    }


def weights(model: Any) -> dict[str, Tensor]:
    frozen = ("embed_tokens", "verifier_lm_head", "verifier_norm", "t2d", "d2t")
    return {name: value for name, value in model.state_dict().items() if name.split(".")[0] not in frozen}


def draft_tree(model: Any, given: dict[str, Tensor], lm_head: Any, logits: Any) -> dict[str, Tensor]:
    """Return the logits of every position of the text, and EAGLE-2's tree behind it."""
    model.embed_tokens.weight.data = given["embedding"].clone()
    model.init_tree()
    model.reset()
    rows = model(given["layers"], given["tokens"][:, 1:])
    model.reset_kv()
    tokens, _, ancestors, _ = model.topK_genrate(given["layers"], given["tokens"], lm_head, None)
    return {**weights(model), **given, "logits": logits(rows)[0], "draft": tokens[0], "ancestors": ancestors[0, 0]}


def eagle(folder: Path) -> dict[str, Tensor]:
    sys.path.insert(0, str(folder))
    from eagle.model import cnets1

    model = cnets1.Model(SimpleNamespace(**SHAPE, **OLD_NAMES), total_tokens=12, depth=FRAMES - 1, top_k=4).eval()
    draw(model)
    given = inputs(1)
    lm_head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    lm_head.weight.data = given["lm_head"]
    return draft_tree(model, given, lm_head, lm_head)


def eagle3(folder: Path) -> dict[str, Tensor]:
    sys.path.insert(0, str(folder))
    from eagle.model import cnets

    config = SimpleNamespace(**SHAPE, **OLD_NAMES, draft_vocab_size=DRAFTED)
    model = cnets.Model(config, total_tokens=12, depth=FRAMES - 1, top_k=4).eval()
    draw(model)
    drafted = torch.randperm(VOCABULARY)[:DRAFTED].sort().values
    model.d2t.copy_(drafted - torch.arange(DRAFTED))
    tensors = draft_tree(model, inputs(3), None, lambda rows: model.lm_head(model.norm(rows)))
    return tensors | {"drafted": drafted}


def eagle3_1(folder: Path) -> dict[str, Tensor]:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig(
        transformer_layer_config=transformers.LlamaConfig(**SHAPE, attn_implementation="eager"),
        draft_vocab_size=VOCABULARY, eagle_aux_hidden_state_layer_ids=[0, 1], fc_norm=True, norm_output=True,
    )  # fmt: skip
    model, given = Eagle3DraftModel(config).eval(), inputs(2)
    draw(model)
    model.embed_tokens.weight.data = given["embedding"].clone()
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))

    def steps(tokens: Tensor) -> Tensor:
        """Return the logits of every row in every unrolled step."""
        seen.clear()
        layers = torch.cat([given["layers"], torch.zeros(1, tokens.shape[1] - TEXT, 2 * WIDTH)], dim=1)
        model(layers, tokens, torch.zeros_like(tokens), ttt_steps=FRAMES)
        return torch.stack(seen)

    tokens = given["tokens"][:, 1:]
    results, draft = {"logits": steps(tokens)}, []
    for step in range(FRAMES):  # the last anchor along its own tokens
        draft.append(steps(torch.nn.functional.pad(tokens, (0, FRAMES)))[step, TEXT - 1].argmax())
        tokens = torch.cat([tokens, draft[-1][None, None]], dim=1)[:, : TEXT + FRAMES]
    return {**weights(model), **given, **results, "draft": torch.stack(draft)}


# Per method: source, version or commit, what was run. All are under Apache-2.0.
AT_EAGLE = ("github.com/SafeAILab/EAGLE", "cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b")
SOURCES = {
    "eagle": (*AT_EAGLE, "eagle/model/cnets1.py: Model.forward and topK_genrate"),
    "eagle3": (*AT_EAGLE, "eagle/model/cnets.py: Model.forward and topK_genrate"),
    "eagle3_1": ("speculators", "0.9.0", "the training forward of Eagle3DraftModel with fc_norm and norm_output"),
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", choices=sorted(SOURCES))
    for name in ("eagle", "medusa", "hydra"):
        parser.add_argument(f"--{name}", type=Path, default=Path())
    arguments = parser.parse_args()
    for name in arguments.methods:
        torch.manual_seed(0)
        folder = getattr(arguments, name.partition("3")[0].partition("_")[0])
        tensors = {key: value.clone().contiguous() for key, value in globals()[name](folder).items()}
        file = Path(__file__).with_name(f"{name}.safetensors")
        source, version, run = SOURCES[name]
        save_file(tensors, file, {"source": source, "commit": version, "license": "Apache-2.0", "run": run})
        print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
