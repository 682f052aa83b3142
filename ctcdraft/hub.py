"""A trained head in other hands: the Hugging Face layout, and a hook for `generate`. It trains and measures nothing.

    head = PublishedHead.from_pretrained(FOLDER_OR_HUB_ID, model=model, tokenizer=tokenizer)
    ids = model.generate(**inputs, custom_generate=head.generate)

A published head is config.json (the drafter's values and the fingerprint of its base), model.safetensors and a model
card. Like the entry points this is where config ends: no room behind imports it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import ctcdraft
from ctcdraft.config.allowed import ALLOWED_TARGETS, parse_trust, read_run_config, refuse_foreign
from ctcdraft.config.build import build_drafter, load_drafter
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError
from ctcdraft.io import atomic_write
from ctcdraft.model_card import model_card
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.compatibility import refuse_inexact_tree_attention
from ctcdraft.models.values import looks_like_folder
from ctcdraft.renamed import current
from ctcdraft.training.run_directory import RunDirectory, load_trainable_state, refuse_other_base

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
SUPPORTED_WARPERS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")  # which `Settings` does itself
SUPPORTED_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
MATCHING_FIELDS = ("weights", "width", "vocabulary", "taps", "tokenizer")  # a chat template is whoever's who prompts


class PublishedHead(ModelHubMixin):
    """A head with its base. save_pretrained, from_pretrained and push_to_hub are those of huggingface_hub.

    nodes: how many nodes a tree may have, the root counted; more pay where the base is large.
    """

    def __init__(self, drafter: DraftHead, base: BaseLM, config_values: Mapping[str, Any], card: str) -> None:
        self.drafter = drafter
        self.base = base
        self.config_values = dict(config_values)
        self.card = card
        self.nodes = int(config_values["nodes"])

    @classmethod
    def from_run(cls, run: str | Path, base: BaseLM, trust: Collection[str] = ()) -> Self:
        """The head of a run directory, ready to be saved; its card is written from the run and its evaluations. trust:
        as of from_pretrained."""
        from omegaconf import OmegaConf

        directory = RunDirectory(Path(run))
        if "adapter" in directory.base_fingerprint():
            raise InputError(
                f"the head in {run} was trained along with its base (adapt=lora), so it fits no base that others have; "
                "a head that is to be published is trained with adapt=none"
            )
        drafter = load_drafter(directory.path, base, None, parse_trust(trust))
        config: Any = OmegaConf.to_container(read_run_config(directory.config, parse_trust(trust)), resolve=True)
        config_values = {
            "library": f"ctcdraft {ctcdraft.__version__}",
            "drafter": config["drafter"],
            "nodes": config["decoding"]["nodes"],
            "fingerprint": json.loads(directory.fingerprint.read_text()),
        }
        return cls(
            drafter, base, config_values, model_card(directory.path, config, config_values["fingerprint"], drafter)
        )

    def _save_pretrained(self, save_directory: Path) -> None:
        tensors = {
            name: value.detach().cpu().contiguous() for name, value in self.drafter.trainable_state_dict().items()
        }
        atomic_write(save_directory / WEIGHTS_FILE, lambda draft: save_file(tensors, draft))
        (save_directory / CONFIG_FILE).write_text(json.dumps(self.config_values, indent=2) + "\n")
        (save_directory / CARD_FILE).write_text(self.card)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **given: Any) -> Self:
        """A head from a folder or a hub id, for `model=` (the base as stock transformers loads it, frozen from here
        on) and `tokenizer=` (its own); the rest is huggingface_hub's: revision, token, cache_dir, ...

        Only parts of ctcdraft are built from its config. trust: names of further classes, for a drafter of your own:
        `trust=["mymodule.MyDrafter"]`. Their module is imported, so name only what you have read."""
        given["trust"] = parse_trust(given.get("trust"))  # always there, so that no config.json can be asked for it
        for key in ("model", "tokenizer"):
            if given.get(key) is None:
                raise InputError(f"a head drafts for a base: give {key}= to PublishedHead.from_pretrained")
        place = str(pretrained_model_name_or_path)
        if looks_like_folder(place) and not Path(place).is_dir():
            raise InputError(f"no head at {place}: there is no such folder")
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **given)
        except json.JSONDecodeError as error:  # it looks into config.json before we do
            raise damaged_file_error(Path(pretrained_model_name_or_path) / CONFIG_FILE) from error

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        **given: Any,
    ) -> Self:
        folder = Path(model_id)
        if not folder.is_dir():
            where: Any = {"revision": revision, "cache_dir": cache_dir, "force_download": force_download}
            folder = Path(snapshot_download(model_id, local_files_only=local_files_only, token=token, **where))
        config_values = read_head_config(folder, given["trust"])
        base = BaseLM(
            given["model"],
            given["tokenizer"],
            config_values["fingerprint"]["base"],
            taps=config_values["fingerprint"]["taps"],
        )
        refuse_other_base(config_values["fingerprint"], base.fingerprint(), folder, MATCHING_FIELDS)
        refuse_inexact_tree_attention(base)
        drafter = build_drafter(to_omegaconf(config_values["drafter"]), base)
        if not isinstance(drafter, DraftHead):
            raise InputError(
                f"{folder / CONFIG_FILE} has a drafter that is no head: {config_values['drafter'].get('_target_')}"
            )
        load_trainable_state(drafter, read_weights(folder / WEIGHTS_FILE), folder / WEIGHTS_FILE)
        card = folder / CARD_FILE
        return cls(drafter.for_inference(base), base, config_values, card.read_text() if card.is_file() else "")

    def generate(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = (),
        stopping_criteria: Any = (),
        generation_config: Any = None,
        stop_strings: Any = None,
        **other_inputs: Any,
    ) -> Tensor:
        """What `model.generate(**inputs, custom_generate=head.generate)` calls; token ids [1, L], prompt included.

        Greedy and in float32, the ids are those of `model.generate`, up to the end of the base's context. In half
        precision they may differ where two tokens are nearly tied, as a forward pass over a tree rounds otherwise than
        one over a single token: on 8 of 30 prompts in results/losslessness. Sampled, the ids are a draw from the
        same distribution (temperature, top_k, top_p), reproducible under one torch seed, but other ids than those of
        stock `generate` under that seed, which consumes random numbers in another way. Whatever else is asked of
        `generate` is refused in a sentence; not so a streamer, which transformers keeps to itself: it receives the
        prompt alone.
        """
        refuse_unsupported_generate(
            self.base.lm, model, input_ids, logits_processor, stopping_criteria, generation_config
        )
        refuse_unsupported_inputs(input_ids, other_inputs, stop_strings)
        prompt_L, options = input_ids[0], generation_config
        sampled = bool(options.do_sample)
        settings = DecodingSettings(
            max_new_tokens=options.max_length - len(prompt_L),
            nodes=self.nodes,
            temperature=float(options.temperature if options.temperature is not None else 1.0) if sampled else 0.0,
            top_k=int(options.top_k or 0) if sampled else 0,
            top_p=float(options.top_p if options.top_p is not None else 1.0) if sampled else 1.0,
            verify=match,
            lossless=True,
        )
        stops = options.eos_token_id if isinstance(options.eos_token_id, list) else [options.eos_token_id]
        seed = int(torch.randint(2**31, ())) if sampled else 0
        made = generate(self.base, self.drafter, prompt_L, settings, {one for one in stops if one is not None}, seed)
        return torch.cat([input_ids, torch.tensor([made.tokens], device=input_ids.device)], dim=1)


def refuse_unsupported_generate(
    own: Any, model: Any, input_ids: Tensor, processors: Any, criteria: Any, options: Any
) -> None:
    """Raise InputError for what this loop would silently do otherwise than `generate`."""
    wants = [type(one).__name__ for one in processors if type(one).__name__ not in SUPPORTED_WARPERS]
    wants += [type(one).__name__ for one in criteria if type(one).__name__ not in SUPPORTED_CRITERIA]
    if model is not own:
        raise InputError("this head was loaded for another model object; call generate on the one it was given")
    if input_ids.shape[0] != 1:
        raise InputError(f"{input_ids.shape[0]} rows were asked for, but drafts are for latency: one row a call")
    if options.return_dict_in_generate:
        wants.append("return_dict_in_generate")
    if wants:
        raise InputError(f"{', '.join(wants)} is not served with custom_generate=head.generate; leave it out")


def refuse_unsupported_inputs(input_ids: Tensor, other_inputs: Mapping[str, Any], stop_strings: Any) -> None:
    """Raise InputError for what `generate` hands on beside the ids and the loop would not look at.

    stop_strings: a parameter of `PublishedHead.generate` so that transformers hands it on. It keeps the tokenizer that
    goes with it from a function it calls, and would otherwise refuse here, saying that no tokenizer was given.
    """
    mask = other_inputs.get("attention_mask")
    if stop_strings is not None:
        raise InputError("stop_strings= is not served with custom_generate=head.generate; leave it out")
    if input_ids.shape[1] == 0:
        raise InputError("a prompt of no ids, or of embeddings, is not served with custom_generate=head.generate")
    if mask is not None and not bool(mask.all()):
        raise InputError(
            f"{int((mask == 0).sum())} places of the prompt are masked, and the head would read them; leave padding out"
        )


def read_head_config(folder: Path, trust: Collection[str] = ()) -> dict[str, Any]:
    try:
        values = current(json.loads((folder / CONFIG_FILE).read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged_file_error(folder / CONFIG_FILE) from error
    if not isinstance(values, dict) or not isinstance(values.get("drafter", {}), dict):
        raise damaged_file_error(folder / CONFIG_FILE)
    missing = [key for key in ("drafter", "nodes", "fingerprint") if key not in values]
    if missing:
        raise InputError(f"{folder / CONFIG_FILE} has no `{missing[0]}`: this is no head of ctcdraft's")
    refuse_foreign({"drafter": values["drafter"]}, folder / CONFIG_FILE, ALLOWED_TARGETS["drafter"], trust)
    return values


def damaged_file_error(file: Path) -> InputError:
    return InputError(f"{file} is missing or damaged; give a folder that save_pretrained made, or fetch it again")


def read_weights(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise damaged_file_error(file) from error


def to_omegaconf(values: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(values)
