"""Published draft heads: the Hugging Face layout, and decoding inside `model.generate`.

    head = PublishedHead.from_pretrained(FOLDER_OR_HUB_ID, model=model, tokenizer=tokenizer)
    ids = model.generate(**inputs, custom_generate=head.generate)

A published head is config.json (the drafter's config and its base's fingerprint), model.safetensors and a model card.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor

import ctcdraft
from ctcdraft.config.allowed import parse_trust, read_run_config
from ctcdraft.config.drafters import load_drafter
from ctcdraft.config.published_head import (
    CARD_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    damaged_file_error,
    load_published_drafter,
    read_head_config,
    read_policy,
)
from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.verification import match
from ctcdraft.drafters.adaptive import AdaptiveDrafter
from ctcdraft.drafters.base import DraftHead
from ctcdraft.errors import InputError, check_int
from ctcdraft.io import atomic_write
from ctcdraft.model_card import model_card
from ctcdraft.models.aux_layers import view_of_layers
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.compatibility import refuse_inexact_tree_attention
from ctcdraft.models.fingerprint import short_hash
from ctcdraft.models.loading import looks_like_folder
from ctcdraft.training.run_directory import RunDirectory

ADAPTIVE = "adaptive"
DOWNLOAD_OPTIONS = ("revision", "cache_dir", "force_download", "local_files_only", "token")  # of huggingface_hub
SUPPORTED_WARPERS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")  # done by DecodingSettings
SUPPORTED_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")


class PublishedHead(ModelHubMixin):
    """A draft head with its base; save_pretrained, from_pretrained and push_to_hub are those of huggingface_hub.

    `nodes`, the tree size with the root, may be changed; larger trees pay off on larger bases. "adaptive" follows the
    policy that an evaluation with decoding.nodes=adaptive stored, and is the default where there is one.
    """

    dtype: torch.dtype | None = None  # of saved weights; None: the base's

    def __init__(self, drafter: DraftHead, base: BaseLM, config_values: Mapping[str, Any], card: str) -> None:
        self.drafter = drafter
        self.base = base
        self.config_values = dict(config_values)
        self.card = card
        self.policy = read_policy(self.config_values)
        self.nodes: int | str = int(config_values["nodes"]) if self.policy is None else ADAPTIVE

    @classmethod
    def from_run(
        cls, run: str | Path, base: BaseLM, trust: Collection[str] = (), dtype: torch.dtype | None = None
    ) -> Self:
        """Return the head of a run directory, with a model card from the run and its evaluations.

        Args:
            base: with at least the layers that the head reads: load_base(..., aux_layers=["last", 4, 11]).
            trust: see from_pretrained.
            dtype: of the saved weights; torch.float16 halves the file. None: the base's.
        """
        directory = RunDirectory(Path(run))
        if "adapter" in directory.base_fingerprint():
            raise InputError(
                f"the head in {run} was trained together with a LoRA adapter of its base, which is not published; "
                "train a head for publishing with adapt=none"
            )
        trust = parse_trust(trust)
        base = view_of_layers(base, directory.base_fingerprint().get("taps", base.aux_layers))
        base.state_columns = None  # the head decodes on this view, which has its layers alone
        drafter = load_drafter(directory.path, base, None, trust)
        config: Any = OmegaConf.to_container(read_run_config(directory.config, trust), resolve=True)
        config_values = {
            "library": f"ctcdraft {ctcdraft.__version__}",
            "drafter": config["drafter"],
            "nodes": config["decoding"]["nodes"],
            "fingerprint": json.loads(directory.fingerprint.read_text()),
        }
        if (policy := newest_policy(directory, config["drafter"]["name"])) is not None:
            config_values["policy"] = policy
        card = model_card(directory.path, config, config_values["fingerprint"], drafter)
        head = cls(drafter, base, config_values, card)
        head.dtype = dtype
        return head

    def _save_pretrained(self, save_directory: Path) -> None:
        tensors = {}
        for name, value in self.drafter.trainable_state_dict().items():
            dtype = self.dtype if value.is_floating_point() else None
            # safetensors refuses tensors that are not contiguous.
            tensors[name] = value.detach().to("cpu", dtype or value.dtype).contiguous()
        atomic_write(save_directory / WEIGHTS_FILE, lambda temporary: save_file(tensors, temporary))
        values = self.config_values
        if self.nodes != ADAPTIVE:
            values = {key: value for key, value in values.items() if key != "policy"} | {"nodes": self.nodes}
        (save_directory / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
        (save_directory / CARD_FILE).write_text(self.card)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """Return a head from a folder or a hub id.

        Args:
            model: the base, as stock transformers loads it; it is frozen.
            tokenizer: the base's own.
            trust: classes besides ctcdraft's that config.json may instantiate, such as ["mymodule.MyDrafter"]. Their
                module is imported, so name only code that you have read.
            options: those of huggingface_hub: revision, token, cache_dir, ...
        """
        options["trust"] = parse_trust(options.get("trust"))  # always set, so that config.json cannot supply it
        for key in ("model", "tokenizer"):
            if options.get(key) is None:
                raise InputError(f"{key}= is missing; give the base's {key} to PublishedHead.from_pretrained")
        place = str(pretrained_model_name_or_path)
        if looks_like_folder(place) and not Path(place).is_dir():
            raise InputError(f"no head at {place}: there is no such folder")
        if Path(place).is_dir():  # before huggingface_hub reads config.json, which it expects to be sound
            read_head_config(Path(place), options["trust"])
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **options)
        except json.JSONDecodeError as error:  # of a download
            raise damaged_file_error(Path(pretrained_model_name_or_path) / CONFIG_FILE) from error

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> Self:
        folder = Path(model_id)
        if not folder.is_dir():
            folder = Path(snapshot_download(model_id, **{key: options[key] for key in DOWNLOAD_OPTIONS}))
        config_values = read_head_config(folder, options["trust"])
        taps = config_values["fingerprint"]["taps"]
        base = BaseLM(options["model"], options["tokenizer"], config_values["fingerprint"]["base"], aux_layers=taps)
        refuse_inexact_tree_attention(base)
        if base.dtype == torch.float16 and base.weights_hash != config_values["fingerprint"]["weights"]:
            raise InputError(
                f"loaded as float16 the base is not recognised as the one of the head in {folder}, because its weights "
                "are rounded; load it with dtype='bfloat16' or dtype='float32'"
            )
        drafter, card = load_published_drafter(folder, config_values, base), folder / CARD_FILE
        return cls(drafter, base, config_values, card.read_text() if card.is_file() else "")

    # stop_strings is named because transformers otherwise complains of a missing tokenizer: it does not pass on the one
    # that the user gave.
    def generate(
        self, model: Any, input_ids: Tensor, logits_processor: Any = (), stopping_criteria: Any = (),
        generation_config: Any = None, stop_strings: Any = None, **other_inputs: Any,
    ) -> Tensor:  # fmt: skip
        """Return token ids [1, L], prompt included, for `model.generate(**inputs, custom_generate=head.generate)`.

        Greedy and in float32, the ids are those of `model.generate`, up to the end of the base's context. In half
        precision they may differ where two tokens are nearly tied, as a forward pass over a tree rounds otherwise than
        one over a single token: on 11 of 30 prompts in results/losslessness. Sampled ids follow the same distribution
        (temperature, top_k, top_p) and repeat under one torch seed, but differ from those of stock `generate` under
        that seed, which consumes random numbers in another way. Other options of `generate` raise InputError, except a
        streamer, which transformers does not pass on: it receives the prompt alone.
        """
        if model is not self.base.lm:
            raise InputError("this head was loaded for another model object; call generate on the one it was given")
        refuse_unsupported_options(logits_processor, stopping_criteria, generation_config, stop_strings)
        refuse_unsupported_inputs(input_ids, **other_inputs)
        prompt_L, options = input_ids[0], generation_config
        if len(prompt_L) >= self.base.context_length:
            raise InputError(
                f"the prompt has {len(prompt_L):,} tokens, and the base's context {self.base.context_length:,}, which "
                "leaves no room for a response; shorten the prompt"
            )
        sampled = bool(options.do_sample)
        drafter, nodes = self.drafter_and_nodes()
        settings = DecodingSettings(
            max_new_tokens=options.max_length - len(prompt_L),
            nodes=nodes,
            temperature=float(options.temperature if options.temperature is not None else 1.0) if sampled else 0.0,
            top_k=int(options.top_k or 0) if sampled else 0,
            top_p=float(options.top_p if options.top_p is not None else 1.0) if sampled else 1.0,
            verify=match,
            lossless=True,
        )
        stops = options.eos_token_id if isinstance(options.eos_token_id, list) else [options.eos_token_id]
        seed = int(torch.randint(2**31, ())) if sampled else 0  # torch's own stream, so that its seed repeats the ids
        stop_ids = {stop for stop in stops if stop is not None}
        generation = generate(self.base, drafter, prompt_L, settings, stop_ids, seed)
        return torch.cat([input_ids, torch.tensor([generation.tokens], device=input_ids.device)], dim=1)

    def drafter_and_nodes(self) -> tuple[Any, int]:
        """Return what drafts, and the largest tree it may draft."""
        if self.nodes != ADAPTIVE:
            return self.drafter, check_int(self.nodes, "head.nodes")
        if self.policy is None:
            raise InputError("this head was published without a policy for adaptive trees; set head.nodes to a number")
        return AdaptiveDrafter(self.drafter, self.policy), self.policy.costs.nodes[-1]


def newest_policy(run: RunDirectory, name: str) -> Any:
    """Return the policy of the newest evaluation of these weights with adaptive trees, as JSON; None without one."""
    weights = f"weights {short_hash(run.head.read_bytes())}"
    files = run.path.glob("evaluation/*/sizes.json")
    for file in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        stored = json.loads(file.read_text())
        policy = stored["sizes"].get(name, {}).get("policy")
        if policy is not None and weights in stored["of"]["contestants"][name]:
            return policy
    return None


def refuse_unsupported_options(processors: Any, criteria: Any, options: Any, stop_strings: Any) -> None:
    """Raise InputError for options of `generate` that this decoding loop would ignore."""
    unsupported = [type(one).__name__ for one in processors if type(one).__name__ not in SUPPORTED_WARPERS]
    unsupported += [type(one).__name__ for one in criteria if type(one).__name__ not in SUPPORTED_CRITERIA]
    if options.return_dict_in_generate:
        unsupported.append("return_dict_in_generate")
    if unsupported:
        raise InputError(f"{', '.join(unsupported)} is not supported with custom_generate=head.generate; leave it out")
    if stop_strings is not None:
        raise InputError("stop_strings= is not supported with custom_generate=head.generate; leave it out")


def refuse_unsupported_inputs(
    input_ids: Tensor, attention_mask: Tensor | None = None, inputs_embeds: Tensor | None = None, **_: Any
) -> None:
    """Raise InputError for a prompt of `generate` that is not one whole sequence of ids."""
    if input_ids.shape[0] != 1:
        raise InputError(
            f"the batch size must be 1, got {input_ids.shape[0]}; call generate once per prompt, without num_beams= "
            "and num_return_sequences="
        )
    if input_ids.shape[1] == 0 or inputs_embeds is not None:
        raise InputError("an empty prompt, or one of embeddings, is not supported with custom_generate=head.generate")
    if attention_mask is not None and not bool(attention_mask.all()):
        masked = int((attention_mask == 0).sum())
        raise InputError(f"{masked} positions of the prompt are masked, but the head reads all; leave padding out")
