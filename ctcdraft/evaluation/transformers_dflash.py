"""DFlash as transformers runs it, with the weights of a head that was trained here: a check of ours from outside."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ctcdraft.decoding.settings import DecodingSettings, GenerationResult
from ctcdraft.errors import InputError
from ctcdraft.evaluation.contestants import StockGenerate
from ctcdraft.models.base_model import BaseLM
from ctcdraft.nn.base_layer import BASE_PARAMETER_NAMES
from ctcdraft.nn.draft_vocab import DraftVocabHead
from ctcdraft.nn.slot_bodies import DFlashBody

AROUND_THE_LAYERS = {  # transformers' name -> ours
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "text_norm.weight",
    "norm.weight": "norm.weight",
}


class TransformersDFlash(StockGenerate):
    """Greedy `lm.generate` of transformers with its DFlash candidate generator, which drafts a chain.

    Args:
        head: a trained `drafter=dflash`; its tree is not used.
    """

    def __init__(self, base: BaseLM, head: Any) -> None:
        super().__init__(base, {"speculation_type": "dflash"}, None, None)
        if not hasattr(transformers, "MuseGlimmerAssistantModel"):
            raise InputError(
                f"transformers_dflash needs a version of transformers with DFlash (5.23 or later), this is "
                f"{transformers.__version__}; update it or leave the row out"
            )
        refuse_other_heads(head)
        self.assistant = assistant_model(head.body, layers_read(head, base), mask=base.vocabulary)
        self.assistant.to(base.device, base.dtype).eval()
        # The base's own frequencies, which may be scaled; in float32 whatever its dtype.
        self.assistant.rotary_emb.inv_freq = torch.tensor(head.body.shape.frequencies, device=base.device)
        self.assistant.rotary_emb.attention_scaling = head.body.shape.rotary_scale
        self.mask_D = head.body.mask_D

    @torch.inference_mode()
    def answer(
        self, base: BaseLM, prompt_L: Tensor, settings: DecodingSettings, stops: Collection[int]
    ) -> GenerationResult:
        embedding = EmbeddingWithMask(base.lm.get_input_embeddings(), self.assistant.config.mask_token_id, self.mask_D)
        base.lm.get_input_embeddings = lambda: embedding
        try:
            return super().answer(base, prompt_L, settings, stops)
        finally:
            del base.lm.get_input_embeddings


class EmbeddingWithMask(nn.Module):
    """The base's embedding with one more token, the mask: transformers takes a token of the base that it never uses."""

    def __init__(self, embedding: Any, mask: int, mask_D: Tensor) -> None:
        super().__init__()
        self.embedding, self.mask, self.mask_D = embedding, mask, mask_D

    def forward(self, tokens_BL: Tensor) -> Tensor:
        is_mask_BL = tokens_BL == self.mask
        embedded_BLD = self.embedding(tokens_BL.masked_fill(is_mask_BL, 0))
        return torch.where(is_mask_BL[..., None], self.mask_D.to(embedded_BLD.dtype), embedded_BLD)


def refuse_other_heads(head: Any) -> None:
    """Raise InputError for a drafter that transformers' DFlash cannot be."""
    body = getattr(head, "body", None)
    is_published = isinstance(body, DFlashBody) and body.rows == body.frames + 1 and not body.block.attention.causal
    if (
        not is_published
        or head.correction is not None
        or isinstance(head.head.words, DraftVocabHead)
        or getattr(head.frame_tree, "interprets_as", "tokens") != "tokens"
    ):
        raise InputError(
            "transformers_dflash needs a head of drafter=dflash as published, with neither a correction nor a draft "
            f"vocabulary nor a blank, got {type(head).__name__} with {type(body).__name__}; train one (train.py "
            "drafter=dflash)"
        )


def layers_read(head: Any, base: BaseLM) -> list[int]:
    """Return the entries of base.aux_layers that the head reads: all of its own but `last`."""
    if head.state_columns is None:
        numbers = base.aux_layers
    else:
        numbers = [base.aux_layers[column // base.width] for column in head.state_columns[:: base.width].tolist()]
    layers = [number for number in numbers if isinstance(number, int)]
    if not layers:
        raise InputError("transformers_dflash needs a head of inner layers of the base, got base.aux_layers=[last]")
    return layers


@torch.no_grad()
def assistant_model(body: DFlashBody, layers: list[int], mask: int) -> Any:
    """Return transformers' model with the weights of the body.

    Args:
        layers: numbers of hidden states that it reads, 0 those of the embedding.
        mask: token id of the mask.
    """
    shape = body.shape
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=shape.width, intermediate_size=shape.inner, num_hidden_layers=body.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_width,
        rms_norm_eps=shape.epsilon, max_position_embeddings=shape.positions + body.rows,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        layer_types=["full_attention"] * body.layers, block_size=body.rows, mask_token_id=mask,
        target_layer_ids=[layer - 1 for layer in layers],  # counts the layers from 0, without the embedding
    )  # fmt: skip
    model = transformers.MuseGlimmerAssistantModel(config)
    names = dict(AROUND_THE_LAYERS)
    for number in range(body.layers):
        place = "block" if number == 0 else f"deeper.{number - 1}"
        names |= {f"layers.{number}.{theirs}": f"{place}.{ours}" for ours, theirs in BASE_PARAMETER_NAMES.items()}
    weights = body.state_dict()
    model.load_state_dict({theirs: weights[ours] for theirs, ours in names.items() if ours in weights})
    return model
