"""FP8 checkpoints with scales in the format of the hub, and the models that dequantisation should give."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import random_lm, tiny_tokenizer

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


def quantize_blocks(weight, block=16):
    """Return the codes of a matrix, one scale per block, and the matrix that dequantisation gives."""
    rows, columns = weight.shape
    blocks = weight.view(rows // block, block, columns // block, block)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    dequantised = (codes.float() * scales[:, None, :, None]).view(rows, columns)
    return codes.view(rows, columns), scales, dequantised


def fp8_checkpoint(
    folder, chosen=lambda name: True, config=FP8, scaled="{}_scale_inv", lm=None, tokenizer=tiny_tokenizer
):
    """Save a Llama with the chosen linear layers in FP8; return the model that loading it should give."""
    lm = lm or random_lm()
    tensors = {}
    for name, weight in lm.state_dict().items():
        tensors[name] = weight.contiguous()
        if name.endswith("_proj.weight") and chosen(name):
            codes, scales, dequantised = quantize_blocks(weight)
            tensors |= {name: codes, scaled.format(name): scales}
            weight.copy_(dequantised)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads(lm.config.to_json_string()) | {"dtype": "float32", "quantization_config": config}
    if config is None:
        del stored["quantization_config"]
    (folder / "config.json").write_text(json.dumps(stored))
    tokenizer().save_pretrained(folder)
    return lm
