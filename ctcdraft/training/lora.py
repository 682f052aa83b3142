"""LoRA of the base model, trained together with a draft head (Medusa-2, Cai et al. 2024); it changes the base's output.

The objective's gradient reaches the LoRA weights through the hidden states. A KL term keeps the next-token distribution
near that of the unchanged base at the same anchors. Cross-entropy on the corpus would not do: the responses are the
base's own, so it would sharpen the distribution, which shows at temperatures above 0. The unchanged base is the same
model with the adapter disabled, so no second copy is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ctcdraft.batch import Batch
from ctcdraft.drafters.base import uses_hidden_states
from ctcdraft.errors import InputError, first_line
from ctcdraft.io import atomic_write
from ctcdraft.models.base_model import BaseLM
from ctcdraft.models.fingerprint import tensors_hash
from ctcdraft.objectives.base import Loss, Objective, masked_mean

ADAPTER_WEIGHTS = "adapter_model.safetensors"  # with adapter_config.json: peft's layout


class LoRAAdapter:
    """A peft LoRA inside the base model, initialised without effect.

    Args:
        targets: ends of the names of linear layers, as in [q_proj,v_proj], or peft's all-linear.
        learning_rate: of the LoRA weights, with the schedule of the head's.
        weight: of the KL term in the loss.
    """

    def __init__(
        self, base: BaseLM, drafter: nn.Module,
        rank: int, alpha: int, targets: Sequence[str] | str, learning_rate: float, weight: float,
    ) -> None:  # fmt: skip
        import peft

        targets = targets if isinstance(targets, str) else list(targets)
        self.base = base
        self.learning_rate = learning_rate
        self.weight = weight
        if not uses_hidden_states(drafter):
            raise InputError(
                f"{type(drafter).__name__} uses no hidden states, so the base model gets no gradient; give adapt=none"
            )
        self.config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)
        try:
            self.model = peft.get_peft_model(base.lm, self.config)
        except ValueError as error:
            raise InputError(f"adapt.targets={targets} do not fit {base.name}: {first_line(error)}") from error
        if (base.lm.get_output_embeddings(), base.lm.get_input_embeddings()) != (base.head, base.embedding):
            raise InputError(
                f"adapt.targets={targets} include the lm_head or the embedding of {base.name}, which the drafter "
                "shares and which stay frozen; leave them out"
            )

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their names in the base model."""
        return {name: value for name, value in self.base.lm.named_parameters() if value.requires_grad}

    def read(self, base: BaseLM, tokens_BL: Tensor, position_ids_BL: Tensor | None = None) -> Tensor:
        """Return hidden states_BLD of right-padded rows, with a gradient; replaces compute_hidden_states in Batches."""
        tokens_BL = tokens_BL.to(base.device)
        return base.hidden_states_with_grad(tokens_BL, torch.ones_like(tokens_BL), position_ids_BL)

    def divergence(self, batch: Batch) -> Tensor:
        """Return KL(unchanged || adapted) of next-token distributions, mean over the anchors of non-empty windows."""
        with torch.no_grad(), self.model.disable_adapter():
            before_BLD = self.read(self.base, batch.tokens_BL, batch.position_ids_BL)
        before_BAV, now_BAV = (
            self.next_token_log_probs(states_BLD, batch.anchors_BA) for states_BLD in (before_BLD, batch.states_BLD)
        )
        kl_BA = (before_BAV.exp() * (before_BAV - now_BAV)).sum(dim=-1)
        return masked_mean(kl_BA, batch.lengths_BA > 0)

    def next_token_log_probs(self, states_BLD: Tensor, anchors_BA: Tensor) -> Tensor:
        """Return log-probabilities_BAV of the token after each anchor."""
        states_BLD = states_BLD[..., : self.base.width]  # the last layer; auxiliary layers follow it
        states_BAD = states_BLD.gather(1, anchors_BA[..., None].expand(-1, -1, states_BLD.shape[-1]))
        accumulate_dtype = torch.promote_types(self.base.dtype, torch.float32)
        return self.base.head(states_BAD.to(self.base.dtype)).log_softmax(dim=-1, dtype=accumulate_dtype)

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.parameters.items()}

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        own = self.parameters
        if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in state.items()}:
            raise InputError("the checkpoint's adapter has other layers or another rank; was config.yaml edited?")
        for name, value in own.items():
            value.copy_(state[name])

    def save(self, folder: Path) -> str:
        """Write the adapter in peft's layout; return the hash that identifies the adapted base model."""
        import peft

        tensors = {
            name: v.detach().cpu().contiguous() for name, v in peft.get_peft_model_state_dict(self.model).items()
        }
        try:
            folder.mkdir(exist_ok=True)
            self.config.save_pretrained(str(folder))
        except OSError as error:
            raise InputError(f"cannot write {folder}: {first_line(error)}; make room") from error
        atomic_write(folder / ADAPTER_WEIGHTS, lambda path: save_file(tensors, path))
        return tensors_hash(tensors)


class KLRegularizedObjective:
    """An objective plus the weighted KL term; the logged loss is the objective's alone."""

    def __init__(self, objective: Objective, adapter: LoRAAdapter) -> None:
        self.objective = objective
        self.adapter = adapter
        self.labels = objective.labels
        self.supervises = getattr(objective, "supervises", None)
        # Not for the KL term alone: counting first keeps the base's activations of all batches of a step.
        self.several_counts = getattr(objective, "several_counts", False)

    def __call__(self, emissions: object, batch: Batch) -> Loss:
        loss = self.objective(emissions, batch)  # type: ignore[arg-type]
        divergence = self.adapter.divergence(batch)
        metrics = loss.metrics | {"base_divergence": divergence.detach()}
        return Loss(loss.value + self.adapter.weight * divergence, metrics, loss.count)
