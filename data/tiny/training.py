"""Training of the base on packed rows: model, optimisers, schedule, loop."""

import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from workers import Workers

STEP_TOKENS = 8192
SHORT, LONG = 512, 2048
SHORT_SHARE, DECAY_SHARE, WARM_UP = 0.93, 0.45, 80
PAD, END = 1, 4


def new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=160,
        intermediate_size=384,
        num_hidden_layers=18,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=80,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def optimisers(model: nn.Module, kind: str, rate: float) -> list[torch.optim.Optimizer]:
    hidden = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    rest = [weight for weight in model.parameters() if not any(weight is other for other in hidden)]
    adam = {"lr": rate, "betas": (0.9, 0.95)}
    embedding, norms = [w for w in rest if w.ndim == 2], [w for w in rest if w.ndim == 1]
    groups = [{"params": embedding, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    if kind == "adamw":
        return [torch.optim.AdamW([{"params": hidden, "weight_decay": 0.1}, *groups], **adam)]
    # With this scaling Muon's steps have the size of AdamW's, so both take the same learning rate.
    muon = torch.optim.Muon(hidden, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(groups, **adam)]


def learning_rate(step: int, steps: int) -> float:
    """Return the share of the highest learning rate: warm-up, constant, then a cosine to 2 %."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    decay = int(DECAY_SHARE * steps)
    done = max(0, step - (steps - decay)) / decay
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def batch(rows: dict[int, np.ndarray], step: int, steps: int) -> Tensor:
    """Return the rows of a step: short ones first, long ones at the end."""
    short = int(SHORT_SHARE * steps)
    length, local = (SHORT, step) if step < short else (LONG, step - short)
    count = STEP_TOKENS // length
    pool = rows[length]
    index = np.arange(local * count, (local + 1) * count) % len(pool)
    return torch.from_numpy(pool[index].astype(np.int64))


def next_word_loss(model: nn.Module, tokens_BL: Tensor, exact: bool = False) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not exact):
        logits_BLV = model(input_ids=tokens_BL, use_cache=False).logits
    targets = tokens_BL[:, 1:].flatten()
    return F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), targets, ignore_index=PAD)


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: dict[str, np.ndarray], exact: bool = False) -> dict[str, float]:
    losses = {}
    for name, rows in held_out.items():
        parts = [torch.from_numpy(part.astype(np.int64)) for part in np.array_split(rows, max(1, len(rows) // 8))]
        counts = [int((part[:, 1:] != PAD).sum()) for part in parts]
        total = sum(
            float(next_word_loss(model, part, exact)) * count for part, count in zip(parts, counts, strict=True)
        )
        losses[name] = total / sum(counts)
    return losses


def train(
    rows: dict[int, np.ndarray],
    held_out: dict[str, np.ndarray],
    work: Path,
    steps: int,
    *,
    kind: str,
    rate: float,
    micro: int,
    every: int,
    stop: int | None,
    workers: int,
    save,
) -> None:
    """Train to `steps`, from the last checkpoint in `work` if there is one; `steps` may be lowered."""
    model = new_model()
    steppers = optimisers(model, kind, rate)
    first, tokens, seconds = _restore(work / "checkpoint.pt", model, steppers)
    crew = Workers(workers, model, new_model, next_word_loss, PAD)
    for step in range(first, min(steps, stop or steps)):
        start = time.perf_counter()
        share = learning_rate(step, steps)
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = rate * share
        tokens_BL = batch(rows, step, steps)
        loss = crew.gradient(tokens_BL, micro)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        tokens += int((tokens_BL != PAD).sum())
        spent = time.perf_counter() - start
        seconds += spent
        line = {
            "step": step,
            "loss": loss,
            "rate": rate * share,
            "length": tokens_BL.shape[1],
            "tokens": tokens,
            "tokens_per_second": STEP_TOKENS / spent,
            "seconds": seconds,
        }
        done = step + 1
        if done % every == 0 or done == steps:
            line["held_out"] = held_out_loss(model, held_out)
        with (work / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        if done % every == 0 or done in (steps, stop):
            state = {
                "model": model.state_dict(),
                "steppers": [stepper.state_dict() for stepper in steppers],
                "step": done,
                "tokens": tokens,
                "seconds": seconds,
            }
            torch.save(state, work / "checkpoint.new")
            (work / "checkpoint.new").replace(work / "checkpoint.pt")
            save(model, work / "latest")
    crew.close()
    if stop is None:
        save(model, None)


def _restore(path: Path, model: nn.Module, steppers: list[torch.optim.Optimizer]) -> tuple[int, int, float]:
    if not path.exists():
        return 0, 0, 0.0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for stepper, saved in zip(steppers, state["steppers"], strict=True):
        stepper.load_state_dict(saved)
    return state["step"], state["tokens"], state["seconds"]
