"""Loading of a checkpoint's model and tokenizer by stock transformers, with checks for quantised weights.

The config and the headers of the weight files are inspected before any weight is read: FP8 is dequantised by
transformers, every other quantised checkpoint is refused. Casting quantised codes to another dtype drops their scales
without an error, and transformers loads an unknown quantization as if there were none.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping, Sequence
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ctcdraft.errors import InputError, first_line, unsafe_pickle_error
from ctcdraft.models.checkpoint_files import is_quantized_tensor, stored_tensors
from ctcdraft.models.compatibility import refuse_unsupported_config

# By value of base.quantization: the package that implements it, and why a value is refused.
QUANTIZATION_PACKAGES = {"bitsandbytes_4bit": "bitsandbytes", "torchao_int8": "torchao"}
INEXACT_QUANTIZATIONS = {
    "bitsandbytes_8bit": "LLM.int8 looks for outlier columns over all tokens of a forward pass, so that the logits of "
    "a tree's node depend on its siblings",
}
SCALE_SUFFIXES = ("scale", "scales", "scale_inv", "absmax", "qzeros", "zero_point", "qweight")
# Values of a quantization_config with quant_method fp8 that a test covers; any other one is refused.
TESTED_FP8_OPTIONS = {"scale_fmt": (None, "float"), "expert_dtype": (None, "fp8"), "modules_to_convert": (None,)}


def load_pretrained(
    path: str, revision: str | None, attention: str, options: Mapping[str, Any], dequantises: bool = True
) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a folder or hub id; raise InputError where they cannot be loaded exactly.

    Args:
        options: dtype, quantization and device map, as keyword arguments of `from_pretrained`.
        dequantises: whether FP8 may be dequantised; loading into ZeRO-3 shards skips that step of transformers.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # Left unset, trust_remote_code asks at the terminal whether to run the code in the folder.
    source = {"revision": revision, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(path, **source)
        refuse_unsupported_config(config, path)
        dequantization = dequantization_options(config, path, revision, options, dequantises)
        options = {**options, **dequantization}
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=attention, output_loading_info=True, **source, **options
        )
        lm, report = loaded
        refuse_incomplete(lm, report, path)
        if dequantization:  # transformers 5.23 leaves weights that were not quantised in the dtype they are stored in
            for value in lm.parameters():
                if not value.is_meta:  # on meta: offloaded to a disk
                    value.data = value.data.to(options["dtype"])
        return lm, transformers.AutoTokenizer.from_pretrained(path, **source)
    except InputError:
        raise
    except UnpicklingError as error:
        raise unsafe_pickle_error(path, "base.path") from error
    # ImportError: attention=flash_attention_2 without its package; the others come from damaged files.
    except (OSError, ValueError, ImportError, RuntimeError, KeyError, TypeError, StrictDataclassError) as error:
        raise InputError(
            f"cannot load the base {path}: {first_line(error)}; check base.path= (and base.attention={attention})"
        ) from error


def weight_options(
    dtype: str, device: str, quantization: str | None, map_options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained` for dtype, base.quantization and device map.

    Raises InputError for an unknown or inexact quantization, or one whose package is not installed.
    """
    options = map_options or {"dtype": "auto"}
    if quantization is None:
        return options
    choices = list(QUANTIZATION_PACKAGES)
    if quantization in INEXACT_QUANTIZATIONS:
        reason = INEXACT_QUANTIZATIONS[quantization]
        raise InputError(f"base.quantization={quantization} is refused: {reason}; use {' or '.join(choices)}")
    if quantization not in choices:
        raise InputError(f"base.quantization must be one of {', '.join(choices)} or null, got {quantization}")
    package = QUANTIZATION_PACKAGES[quantization]
    if importlib.util.find_spec(package) is None:
        raise InputError(f"base.quantization={quantization} needs the package {package}, which is not installed")
    if map_options is None:
        options = {"dtype": getattr(torch, dtype), "device_map": device}
    import transformers

    if quantization == "torchao_int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return options | {"quantization_config": transformers.TorchAoConfig(Int8WeightOnlyConfig())}
    return options | {"quantization_config": transformers.BitsAndBytesConfig(load_in_4bit=True)}


def dequantization_options(
    config: Any, path: str, revision: str | None, options: Mapping[str, Any], dequantises: bool
) -> dict[str, Any]:
    """Return the further arguments of `from_pretrained` that dequantise the checkpoint; none if it is unquantised."""
    quantization = find_quantization_config(config)
    if quantization is None:
        for name, dtype, _ in stored_tensors(path, revision):
            if is_quantized_tensor(name, dtype):
                raise quantization_error(path, f"holds {name} as {dtype}, and no quantization_config states its scales")
        return {}
    if "quantization_config" in options:
        already = f"{path}, which is quantised already ({quantization_method(quantization)})"
        raise InputError(f"base.quantization= would quantise {already}; leave it out")
    refuse_untested_quantization(quantization, path)
    if not dequantises:
        raise quantization_error(path, "is quantised with fp8, and base.zero3=true loads no quantised checkpoint")
    refuse_misaligned_scales(path, revision, quantization.get("weight_block_size", (128, 128)))
    import transformers

    # The config given here replaces the checkpoint's own, so its list of unquantised layers has to be repeated.
    skipped = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers")
    dequantize = transformers.FineGrainedFP8Config(dequantize=True, modules_to_not_convert=skipped)
    # "auto" would take the dtype of the first tensor where the config names none, and that may be float8.
    fallback = getattr(config, "dtype", None) or torch.bfloat16
    return {"quantization_config": dequantize} | ({"dtype": fallback} if options.get("dtype") == "auto" else {})


def refuse_untested_quantization(quantization: Mapping[str, Any], path: str) -> None:
    """Raise InputError for a quantization_config that no test covers."""
    if (method := quantization_method(quantization)) != "fp8":
        raise quantization_error(path, f"is quantised with {method}, and only fp8 is dequantised here")
    for key, tested in TESTED_FP8_OPTIONS.items():
        if (value := quantization.get(key)) not in tested:
            raise quantization_error(path, f"is quantised with fp8 and {key}={value}, which is not supported")


def quantization_error(path: str, fault: str) -> InputError:
    return InputError(f"base {path} {fault}; give the checkpoint whose weights are not quantised as base.path=")


def dequantized_config(config: Any, path: str) -> Any:
    """Return the config that a checkpoint has after loading, for plans that load nothing."""
    if (quantization := find_quantization_config(config)) is None:
        return config
    refuse_untested_quantization(quantization, path)
    config = copy.deepcopy(config)
    for one in (config, config.get_text_config(decoder=True)):
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    return config


def find_quantization_config(config: Any) -> dict[str, Any] | None:
    for one in (config, config.get_text_config(decoder=True)):
        for key in ("quantization_config", "compression_config"):  # the second: old files of compressed-tensors
            quantization = getattr(one, key, None)
            if quantization:
                return dict(quantization) if isinstance(quantization, Mapping) else quantization.to_dict()
    return None


def quantization_method(quantization: Mapping[str, Any]) -> str:
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_8bit") or quantization.get("load_in_4bit")):
        return "bitsandbytes"  # of old files, which hold flags in place of the method
    return str(getattr(method, "value", method))


def refuse_quantized(lm: Any, name: str) -> None:
    """Raise InputError for a quantised model: draft heads use its weights as numbers, and codes are not."""
    if (quantization := find_quantization_config(lm.config)) is not None:
        raise InputError(
            f"the model of base {name} is quantised ({quantization_method(quantization)}), which is not supported; "
            "load it dequantised (fp8: from_pretrained(..., quantization_config=FineGrainedFP8Config(dequantize=True)))"
        )


def refuse_misaligned_scales(path: str, revision: str | None, block: Any) -> None:
    """Raise InputError unless every FP8 matrix has scales of the config's block size."""
    shapes = {name: (dtype, shape) for name, dtype, shape in stored_tensors(path, revision)}
    for name, (dtype, shape) in shapes.items():
        if not is_quantized_tensor(name, dtype):
            continue
        scales = shapes.get(f"{name}_scale_inv")
        # A matrix without scales is loaded as bare codes.
        if not dtype.startswith("F8") or not name.endswith(".weight") or scales is None:
            raise quantization_error(path, f"holds {name} as {dtype} without {name}_scale_inv")
        grid = scales[1] if len(scales[1]) == 2 else [1, 1]
        block_shape = block or shape
        # transformers divides the shape of a matrix by that of its scales: 192 rows with 2 scales become blocks of 96
        # where they were blocks of 128 and 64, without an error.
        sizes = zip(shape, grid, block_shape, strict=True)
        if any(blocks not in (1, size) and size != blocks * length for size, blocks, length in sizes):
            scaled = f"with scales of shape {grid}, which are not blocks of {list(block_shape)}"
            raise quantization_error(path, f"holds {name} of shape {shape} {scaled}")


def refuse_incomplete(lm: Any, report: Mapping[str, Any], path: str) -> None:
    """Raise InputError where the checkpoint lacked weights, or had scales that the model did not use."""
    tied = set(getattr(lm, "all_tied_weights_keys", None) or ())
    missing = sorted(set(report["missing_keys"]) - tied)
    if missing:
        raise InputError(
            f"base {path} has no {missing[0]} ({len(missing)} tensors are missing), which would be random; give a "
            "complete checkpoint as base.path="
        )
    scales = sorted(key for key in report["unexpected_keys"] if key.endswith(SCALE_SUFFIXES))
    if scales:
        raise quantization_error(path, f"holds {scales[0]}, which {type(lm).__name__} does not read")
    codes = [name for name, value in lm.named_parameters() if value.is_floating_point() and value.dtype.itemsize == 1]
    if codes and find_quantization_config(lm.config) is None:
        raise quantization_error(path, f"was loaded with {codes[0]} in float8, without its scales")


def eos_token_ids(lm: Any, tokenizer: Any) -> frozenset[int]:
    """Return the EOS token ids of the generation config, else of the model config, else of the tokenizer."""
    for source in (getattr(lm, "generation_config", None), lm.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, Sequence) else [eos])
    return frozenset()
