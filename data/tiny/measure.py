"""Measurements of the trained base: held-out loss, ended and repetitive answers, accuracy."""

import json
import re
from pathlib import Path

import corpus
import numpy as np
import problems
import torch
import training
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 256
BATCH = 30


def repeated_4grams(ids: list[int]) -> float:
    """Return the share of a text's 4-grams that occurred before in the same text.

    1 2 3 4 1 2 3 4  ->  five 4-grams, the last of them (1 2 3 4) for the second time: 0.2
    """
    grams = [tuple(ids[start : start + 4]) for start in range(len(ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def final_number(answer: str) -> str | None:
    found = re.findall(r"The answer is \$?(-?[\d,]*\.?\d+)", answer)
    return found[-1].replace(",", "") if found else None


@torch.no_grad()
def answers(model, tokenizer, questions: list[str]) -> list[list[int]]:
    """Return greedy answers of up to NEW_TOKENS, with the end token where there is one."""
    made = []
    for start in range(0, len(questions), BATCH):
        texts = [corpus.render([question], answer_next=True) for question in questions[start : start + BATCH]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        output_BL: Tensor = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        for ids in output_BL[:, inputs["input_ids"].shape[1] :].tolist():
            made.append(ids[: ids.index(training.END) + 1] if training.END in ids else ids)
    return made


def row(name: str, model, tokenizer, questions: list[str], references: list[str] | None) -> tuple[str, list[str]]:
    """Return a line of the table, and the answers as text."""
    made = answers(model, tokenizer, questions)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in made]
    ended = np.mean([ids[-1] == training.END for ids in made])
    repeated = np.mean([repeated_4grams([word for word in ids if word != training.END]) for ids in made])
    length = np.mean([len(ids) for ids in made])
    right = "-"
    if references:
        hits = [final_number(text) == number for text, number in zip(texts, references, strict=True)]
        right = f"{np.mean(hits):.1%}"
    return f"| {name} | {len(made)} | {ended:.1%} | {repeated:.3f} | {length:.0f} | {right} |", texts


def report(data: Path, threads: int, held_out: dict[str, np.ndarray], base: Path, prompts: Path) -> None:
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    losses = training.held_out_loss(model, held_out, exact=True)
    print("| held-out source | tokens | loss (nats a token) |\n|---|---:|---:|")
    for name, rows in held_out.items():
        print(f"| {name} | {int((rows != corpus.PAD).sum()):,} | {losses[name]:.3f} |")

    kept = [json.loads(line) for line in (prompts / "held_out.jsonl").read_text().splitlines()]
    words = [line for line in kept if line["category"] == "word_problem"]
    talk = [line for line in kept if line["category"] == "chat"]
    trained = frozenset(problem["question"] for problem in corpus.own_problems())
    fresh = problems.problems("train", 200, seed=99, exclude=trained)
    grade_school = corpus.gsm8k(data, "test")[:200]
    sets = [
        ("chat, held-out topics", [line["turns"][0] for line in talk], None),
        (
            "word problems, held-out templates",
            [line["turns"][0] for line in words],
            [line["reference"] for line in words],
        ),
        (
            "word problems, trained templates, new numbers",
            [p["question"] for p in fresh],
            [p["result"] for p in fresh],
        ),
        (
            "GSM8K test, first 200",
            [turns[0] for turns in grade_school],
            [final_number(turns[1]) for turns in grade_school],
        ),
    ]
    print("\n| greedy, at most 256 tokens | prompts | ended | repeated 4-grams | mean tokens | right |")
    print("|---|---:|---:|---:|---:|---:|")
    shown = []
    for name, questions, references in sets:
        line, texts = row(name, model, tokenizer, questions, references)
        print(line, flush=True)
        shown += list(zip(questions, texts, strict=True))[:5] if len(shown) < 10 else []
    print()
    for number, (question, text) in enumerate(shown, 1):
        quoted = text.strip().replace("\n", "\n   > ")
        print(f"{number}. **{question}**\n\n   > {quoted}\n")
