"""Golden tensors of EAGLE, Medusa, Hydra and ReDrafter, by their reference implementations with small random weights.

python tests/golden/make_sequential.py eagle eagle3 --eagle FOLDER    # a checkout of SafeAILab/EAGLE
python tests/golden/make_sequential.py eagle3_1                       # speculators 0.9.0
python tests/golden/make_sequential.py medusa hydra hydra_plus --medusa A --hydra B  # FasterDecoding, zankner
python tests/golden/make_sequential.py redrafter_wide --redrafter FOLDER   # apple/ml-recurrent-drafter
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY, DRAFTED, WIDTH, FRAMES, TEXT = 12, 9, 8, 3, 7
SHAPE = {
    "hidden_size": WIDTH, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY, "pad_token_id": 0,
}  # fmt: skip
OLD_NAMES = {"rope_theta": 10_000.0, "rope_scaling": None, "hidden_act": "silu", "pretraining_tp": 1}


def draw(model: Any) -> None:
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
        weight.copy_(weight.bfloat16())  # stored in bfloat16


def inputs(layers: int) -> dict[str, Tensor]:
    """Return hidden states of a text, its tokens (the last one the root), an embedding and an lm_head."""
    return {
        "layers": torch.randn(1, TEXT, layers * WIDTH).bfloat16().float(),
        "tokens": torch.randint(1, VOCABULARY, (1, TEXT + 1)),
        "embedding": torch.randn(VOCABULARY, WIDTH).bfloat16().float(),
        "lm_head": torch.randn(VOCABULARY, WIDTH).bfloat16().float(),
    }


def weights(model: Any) -> dict[str, Tensor]:
    """Return what is trained."""
    others = ("embed_tokens", "input_embed_fn", "verifier_lm_head", "verifier_norm", "t2d", "d2t", "inv_freq")
    return {name: value for name, value in model.state_dict().items() if not set(name.split(".")) & set(others)}


def smallest(value: Tensor) -> Tensor:
    """Return the values in bfloat16 where they are exact."""
    exact = value.is_floating_point() and torch.equal(value.bfloat16().float(), value)
    return (value.bfloat16() if exact else value).clone().contiguous()


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


CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]


def medusa(folder: Path) -> dict[str, Tensor]:
    sys.path.insert(0, str(folder))
    # Their copies of modeling code need transformers 4; the models of transformers stand for them.
    for name, model in (("llama_kv", "LlamaForCausalLM"), ("mistral_kv", "MistralForCausalLM")):
        sys.modules[f"medusa.model.modeling_{name}"] = SimpleNamespace(**{model: getattr(transformers, model)})  # type: ignore[assignment]
    from medusa.model import medusa_model, utils

    medusa_model.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: None)
    config = transformers.LlamaConfig(**SHAPE, medusa_num_heads=FRAMES, medusa_num_layers=1)
    model = medusa_model.MedusaModelLlama(config).eval()
    draw(model)
    tokens = torch.randint(1, VOCABULARY, (1, TEXT))
    logits, outputs, original = model(tokens, medusa_forward=True, output_orig=True)
    buffers = utils.generate_medusa_buffers(CHOICES, device="cpu")
    indices = buffers["tree_indices"], buffers["retrieve_indices"]
    _, candidates = utils.generate_candidates(logits, original, *indices)
    embedding, lm_head = model.model.embed_tokens.weight, model.lm_head.weight
    given = {"layers": outputs[0], "tokens": torch.cat([tokens, candidates[:, :1]], dim=1)}
    given |= {"embedding": embedding, "lm_head": lm_head}
    results = {"logits": logits[:, 0], "draft": candidates[0], "ancestors": buffers["medusa_attn_mask"][0, 0]}
    return {**model.medusa_head.state_dict(), **given, **results}


def hydra_head(folder: Path, name: str, layers: int) -> tuple[Any, dict[str, Tensor]]:
    sys.path.insert(0, str(folder))
    from hydra.model import hydra_heads

    given = inputs(1)
    embedding = torch.nn.Embedding.from_pretrained(given["embedding"])
    config = transformers.LlamaConfig(**SHAPE, **OLD_NAMES)
    config.rope_scaling, config.rope_theta = None, 10_000.0
    head = getattr(hydra_heads, name)(layers, FRAMES, True, embedding, config).eval()
    draw(head)
    return head, given


def hydra(folder: Path) -> dict[str, Tensor]:
    head, given = hydra_head(folder, "HydraMLP", 1)
    from hydra.model.utils import generate_hydra_buffers

    logits, _ = head(given["layers"], given["tokens"][:, :-1])
    buffers = generate_hydra_buffers(CHOICES, device="cpu")
    root = torch.nn.functional.one_hot(given["tokens"][:, -1:], VOCABULARY).float()
    _, candidates = head.proposal(root, given["layers"], buffers)
    results = {"logits": torch.cat(logits), "draft": candidates[0], "ancestors": buffers["hydra_attn_mask"][0, 0]}
    return {**weights(head), **given, **results}


def hydra_plus(folder: Path) -> dict[str, Tensor]:
    head, given = hydra_head(folder, "HydraPrefixMLP", 2)
    logits, _ = head(given["layers"], given["tokens"][:, :-1])
    tokens, draft = given["tokens"], []
    for frame in range(FRAMES):  # behind the text along its own tokens
        rows = torch.cat([given["layers"], torch.zeros(1, tokens.shape[1] - TEXT, WIDTH)], dim=1)
        draft.append(head(rows, tokens)[0][frame][0, TEXT - 1].argmax())
        tokens = torch.cat([tokens, draft[-1][None, None]], dim=1)
    return {**weights(head), **given, "logits": torch.cat(logits), "draft": torch.stack(draft)}


def redrafter_wide(folder: Path) -> dict[str, Tensor]:
    for name in ("recurrent_drafting", "recurrent_drafting.train"):  # without their imports of all modules
        package: Any = ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    from recurrent_drafting.configuration_drafter import DrafterConfig
    from recurrent_drafting.modeling_drafter import BeamShape, Drafter
    from recurrent_drafting.train.model import ReDrafter

    config = DrafterConfig(VOCABULARY, hidden_size=WIDTH, exit_dim=2 * WIDTH, num_draft_layers=2, rnn=True)
    model, given = Drafter(config).eval(), inputs(1)
    draw(model)
    embedding = torch.nn.Embedding.from_pretrained(given["embedding"])
    rows = torch.nn.functional.pad(given["layers"], (0, 0, 0, 1))  # the root's hidden state is not known yet

    class Base(torch.nn.Module):
        embed_tokens = embedding

        def forward(self, **unused: Any) -> tuple[Tensor]:
            return (rows,)

    trained = ReDrafter(SimpleNamespace(model=Base()), model)  # type: ignore[arg-type]
    logits = trained(given["tokens"], next_n=FRAMES)[:, 0, :TEXT]
    beams, _ = model.beam_search_candidates(rows[:, -2], given["tokens"][:, -1], embedding, BeamShape(1, 1 + FRAMES))
    return {**weights(model), **given, "logits": logits, "draft": beams[0, 0, 1:]}


# Per method: source, version or commit, what was run. All are under Apache-2.0.
AT_EAGLE = ("github.com/SafeAILab/EAGLE", "cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b")
AT_HYDRA = ("github.com/zankner/Hydra", "3f39fbd2c22552e788b62dfd29a12b07ad63abfe")
SOURCES = {
    "eagle": (*AT_EAGLE, "eagle/model/cnets1.py: Model.forward and topK_genrate"),
    "eagle3": (*AT_EAGLE, "eagle/model/cnets.py: Model.forward and topK_genrate"),
    "medusa": (
        "github.com/FasterDecoding/Medusa", "e2a5d20c048a9b0a4092e6933c34313687422518",
        "MedusaModelLlama.forward over the Llama of transformers, generate_candidates",
    ),
    "hydra": (*AT_HYDRA, "HydraMLP.forward and proposal"),
    "hydra_plus": (*AT_HYDRA, "HydraPrefixMLP.forward"),
    "redrafter_wide": (
        "github.com/apple/ml-recurrent-drafter", "bd8586bb9bbfa761644c36f932a0cd1eb3f1cdf9",
        "ReDrafter.forward of train/model.py and Drafter.beam_search_candidates, exit_dim=2*hidden_size and rnn=True",
    ),
    "eagle3_1": ("speculators", "0.9.0", "the training forward of Eagle3DraftModel with fc_norm and norm_output"),
}  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", choices=sorted(SOURCES))
    for name in ("eagle", "medusa", "hydra", "redrafter"):
        parser.add_argument(f"--{name}", type=Path, default=Path())
    arguments = parser.parse_args()
    for name in arguments.methods:
        torch.manual_seed(0)
        folder = getattr(arguments, name.partition("3")[0].partition("_")[0])
        tensors = {key: smallest(value) for key, value in globals()[name](folder).items()}
        file = Path(__file__).with_name(f"{name}.safetensors")
        source, version, run = SOURCES[name]
        save_file(tensors, file, {"source": source, "commit": version, "license": "Apache-2.0", "run": run})
        print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
