"""A head's folder given as the model: the base and the draft length are those that its config.json names.

The keys are those of the speculators format. vLLM looks them up itself, and a plug-in may register a name there, but
the name becomes the drafting method, and methods are a fixed list (vLLM 0.32); so the folder is resolved before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ctcdraft.errors import InputError

MODEL_TYPE = "ctc"


def resolve(arguments: Any, proposer: str) -> None:
    """Replace the folder of a head in vLLM's EngineArgs by its base, and the settings that serve the head with it."""
    folder = Path(str(arguments.model))
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return  # no local folder of a head; vLLM reports what is wrong with it
    if not isinstance(values, dict) or values.get("speculators_model_type") != MODEL_TYPE:
        return
    try:
        named = values["speculators_config"]
        base, tokens = named["verifier"]["name_or_path"], named["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"{folder / 'config.json'} has no speculators_config with verifier.name_or_path and "
            "proposal_methods[0].speculative_tokens; add them, or give the base as the model"
        ) from error
    if arguments.tokenizer in (None, arguments.model):
        arguments.tokenizer = base
    arguments.model = base
    drafting = {"num_speculative_tokens": tokens} | (arguments.speculative_config or {})
    arguments.speculative_config = drafting | {"method": "custom_class", "model": proposer}
    given = arguments.additional_config or {}
    arguments.additional_config = given | {"ctcdraft": {"head": str(folder)} | given.get("ctcdraft", {})}
