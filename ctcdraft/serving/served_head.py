"""A published head on the weights of a served model: loaded, compared with its base, and refused where it does not fit.

The engine's model shares its embedding and lm_head with the head. Its other weights are fused and sharded, so the
base's fingerprint is computed from the checkpoint's files, of which a few values per tensor are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ctcdraft.config.published_head import (
    MATCHING_FIELDS,
    is_published_head,
    load_published_drafter,
    read_head_config,
    read_policy,
)
from ctcdraft.drafters.acceptance import AcceptanceModel
from ctcdraft.drafters.parallel import ParallelDrafter
from ctcdraft.errors import InputError, first_line
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.fingerprint import weights_hash
from ctcdraft.models.loading import looks_like_folder
from ctcdraft.models.meta import build_meta_base
from ctcdraft.serving.chains import CHAIN_SEARCHES, ChainSearch


@dataclass(frozen=True)
class ServedHead:
    """A head that is ready to draft."""

    drafter: ParallelDrafter
    search: ChainSearch
    acceptance: AcceptanceModel  # how probable it is that a draft token of some path probability is accepted
    layer_order: list[int]  # where each of its hidden-state layers is in [last, auxiliary layers in ascending order]
    positions: int  # of the base's context

    @property
    def blocks(self) -> int:
        """The number of blocks that keep keys and values of the text."""
        return int(self.drafter.body.layers)


def head_config(folder: Path) -> dict[str, Any]:
    """Return config.json of the folder of a head; raise InputError for what is none, or what is not served."""
    if not is_published_head(folder):
        raise InputError(
            f"there is no head at {folder}: it needs the config.json and model.safetensors that save_pretrained writes"
        )
    values = read_head_config(folder)
    target = str(values["drafter"].get("_target_"))
    if target != f"{ParallelDrafter.__module__}.{ParallelDrafter.__qualname__}":
        raise InputError(
            f"{target} is not served: only heads that compute all frames at once are (ctc, ctc_gru, transducer, "
            "medusa, blockwise, dflash, dspark, domino)"
        )
    return values


def load_served_head(
    folder: Path,
    values: dict[str, Any],
    model: str,
    revision: str | None,
    warn: Callable[[str], None],
    embedding_VD: Tensor | None = None,
    head_VD: Tensor | None = None,
) -> ServedHead:
    """Return the head of a folder on a served model; raise InputError where it was trained for another one.

    Args:
        values: of `head_config`.
        model: folder or hub id of the served checkpoint.
        warn: called with a sentence about what could not be compared.
        embedding_VD, head_VD: the served model's own weights, which are shared; they may have padded rows. None: for
            the checks alone, on the meta device.
    """
    layers, dtype = values["fingerprint"]["taps"], torch.float32 if head_VD is None else head_VD.dtype
    base = build_meta_base(model, str(dtype).removeprefix("torch."), revision=revision, aux_layers=layers)
    base.weights_hash = checkpoint_hash(base, model, revision)
    refuse_other_head_inputs(base, model)
    absent = {"weights": not base.weights_hash, "tokenizer": base.tokenizer is None}
    compared = tuple(field for field in MATCHING_FIELDS if not absent.get(field))
    if absent["weights"] and head_VD is not None:  # before vLLM loads them, they may not be on this machine
        warn(f"the weights of {model} are not stored as transformers names them; the head's base is not compared")
    if absent["tokenizer"]:
        warn(f"{model} has no tokenizer on this machine; the head's is not compared with it")
    if embedding_VD is not None and head_VD is not None:
        for name, weight_VD in (("embedding", embedding_VD), ("lm_head", head_VD)):
            if not weight_VD.is_floating_point() or weight_VD.dim() != 2 or len(weight_VD) < base.vocabulary:
                raise InputError(
                    f"the {name} of {model} has {tuple(weight_VD.shape)} weights of {weight_VD.dtype}, and the head "
                    f"needs {base.vocabulary} rows; serve a checkpoint whose {name} is not quantised"
                )
        share_weights(base, embedding_VD[: base.vocabulary].detach(), head_VD[: base.vocabulary].detach())
    drafter: Any = load_published_drafter(folder, values, base, compared)
    if drafter.reads_tokens:
        raise InputError(
            f"the head in {folder} reads the tokens of the text beside their hidden states "
            f"({type(drafter.body).__name__}), which are not recorded in serving; serve dflash, dspark or another head "
            "that reads hidden states alone"
        )
    interprets_as = getattr(drafter.frame_tree, "interprets_as", None)
    if interprets_as not in CHAIN_SEARCHES:
        raise InputError(
            f"the head in {folder} reads its frames as {interprets_as}, which is not served; publish it with a tree "
            f"that reads them as {', '.join(CHAIN_SEARCHES)}"
        )
    policy = read_policy(values)
    acceptance = AcceptanceModel() if policy is None else policy.model
    order = [0] + [1 + sorted(set(layers[1:])).index(layer) for layer in layers[1:]]
    return ServedHead(drafter, CHAIN_SEARCHES[interprets_as], acceptance, order, base.context_length)


def refuse_other_head_inputs(base: BaseLM, model: str) -> None:
    """Raise InputError where the head reads more of the base than the two matrices that are shared with it."""
    if getattr(base.head, "bias", None) is not None or type(base.embedding) is not nn.Embedding:
        raise InputError(f"{model} has a biased lm_head or scaled embeddings, which heads are not served with")


def share_weights(base: BaseLM, embedding_VD: Tensor, head_VD: Tensor) -> None:
    """Replace embedding and lm_head of a base on the meta device by modules over these weights."""
    embedding = nn.Embedding.from_pretrained(embedding_VD)
    vocabulary, width = head_VD.shape
    head = nn.Linear(width, vocabulary, bias=False, device="meta")
    head.weight = nn.Parameter(head_VD, requires_grad=False)
    base.embedding, base.head = embedding, head
    base.lm.set_input_embeddings(embedding)
    base.lm.set_output_embeddings(head)


def checkpoint_hash(base: BaseLM, model: str, revision: str | None) -> str:
    """Return the hash of a checkpoint's weights, "" where its files do not name them as transformers does."""
    folder = Path(model)
    if not looks_like_folder(model):
        import huggingface_hub

        folder = Path(huggingface_hub.snapshot_download(model, revision=revision, local_files_only=True))
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= load_file(file)  # mapped, not read
        except Exception as error:
            raise InputError(f"{file} cannot be read ({first_line(error)}); download {model} again") from error
    for tied, source in (getattr(base.lm, "_tied_weights_keys", None) or {}).items():
        if tied not in tensors and source in tensors:
            tensors[tied] = tensors[source]
    if set(tensors) != set(base.lm.state_dict()):
        return ""
    with torch.device("meta"):
        lm = type(base.lm)(base.lm.config)
    lm.load_state_dict(tensors, assign=True)
    return weights_hash(lm)
