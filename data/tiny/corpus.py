"""Training data of the base: sources, their shares, and packing.

A conversation is a list of turns, user first, assistant last.
"""

import gzip
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import chat
import numpy as np
import problems

SPECIALS = ["<|bos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD = SPECIALS.index("<|pad|>")

# source: (share of all tokens, file, longest answer in characters, is every answer checked for an ending)
SHAREGPT = {
    "sgd": (0.12, "sgd.jsonl.gz", 600, False),
    "gpteacher_roleplay": (0.08, "gpteacher_roleplay.jsonl", 1000, True),
    "oasst_model_eval": (0.07, "oasst_model_eval.jsonl.gz", 1000, True),
    "oasst_1k_prompts": (0.02, "oasst_1k_prompts.jsonl", 900, True),
    "mt_bench_101": (0.04, "mt_bench_101.jsonl", 900, True),
    "topical_chat": (0.05, "topical_chat.jsonl.gz", 600, False),
    "taskmaster4": (0.012, "taskmaster4.jsonl", 600, False),
    "gpteacher_codegen": (0.01, "gpteacher_codegen.jsonl", 400, True),
    "dpo_en_demo_chosen": (0.006, "dpo_en_demo_chosen.jsonl", 1500, True),
    "kto_en_demo_good": (0.004, "kto_en_demo_good.jsonl", 1500, True),
    "sharegpt_gpt4_256": (0.004, "sharegpt_gpt4_256.jsonl", 1500, True),
    "fastchat_dummy": (0.004, "fastchat_dummy.jsonl", 600, True),
}
SHARES = {"gsm8k": 0.23, "problems": 0.29, "chat": 0.06, **{name: row[0] for name, row in SHAREGPT.items()}}
ENDINGS = tuple(".!?\"')]}`*")
GSM8K_HELD_OUT = 200
LONGEST = 450  # characters; small models trained on long answers repeat themselves
OWN_PROBLEMS = 101_814  # in 3,000 steps hardly any is repeated


def render(turns: list[str], answer_next: bool = False) -> str:
    """Render the chat template in Python, a hundred times faster; build.py checks that both agree."""
    text = "<|bos|>"
    for number, turn in enumerate(turns):
        text += f"{'<|assistant|>' if number % 2 else '<|user|>'}\n{turn.strip()}<|end|>\n"
    return text + ("<|assistant|>\n" if answer_next else "")


def gsm8k_answer(text: str) -> str:
    """`... 48/2 = <<48/2=24>>24 ... #### 72` becomes `... 48/2 = 24 ... The answer is 72.`"""
    steps, final = re.sub(r"<<[^>]*>>", "", text).split("####")
    return f"{steps.strip()}\nThe answer is {final.strip()}."


def gsm8k(data: Path, name: str) -> list[list[str]]:
    rows = [json.loads(line) for line in (data / "gsm8k" / f"{name}.jsonl").read_text().splitlines()]
    return [[row["question"], gsm8k_answer(row["answer"])] for row in rows]


def own_problems() -> list[dict]:
    return problems.problems("train", OWN_PROBLEMS, seed=1)


def conversations(data: Path, held_out: bool) -> dict[str, list[list[str]]]:
    """Return every source's conversations, for training or held out."""
    grade_school = gsm8k(data, "train")
    random.Random("gsm8k").shuffle(grade_school)
    sources = {"gsm8k": grade_school[:GSM8K_HELD_OUT] if held_out else grade_school[GSM8K_HELD_OUT:]}
    if held_out:
        sources["problems"] = [[row["question"], row["answer"]] for row in problems.problems("held_out", 200, seed=7)]
    else:
        sources["problems"] = [[row["question"], row["answer"]] for row in own_problems()]
        sources["chat"] = [[row["prompt"], row["answer"]] for row in chat.pairs(30_000, seed=1)]
    for name in SHAREGPT:
        sources[name] = list(_sharegpt(data, name, held_out))
    return sources


def _sharegpt(data: Path, name: str, held_out: bool) -> Iterator[list[str]]:
    _, file, longest, checked = SHAREGPT[name]
    path = data / "sharegpt" / file
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            # About one prompt in a hundred is held out, together with all of its answers.
            drawn = int(hashlib.sha256(row["prompt_id"].encode()).hexdigest()[:8], 16) % 100 == 0
            if drawn == held_out:
                turns = [turn["value"].strip() for turn in row["conversations"]]
                if turns := _cut(turns, longest, checked):
                    yield turns


def _cut(turns: list[str], longest: int, checked: bool) -> list[str]:
    """Return the exchanges before the first answer that is too long or breaks off."""
    for number in range(1, len(turns), 2):
        question, answer = turns[number - 1 : number + 1]
        if (
            not 0 < len(answer) <= min(longest, LONGEST)
            or len(question) > 1500
            or (checked and not answer.endswith(ENDINGS))
        ):
            return turns[: number - 1]
    return turns


def stream(documents: list[list[int]], tokens: int, length: int, rng: random.Random) -> list[list[int]]:
    """Return documents in random order, repeated until `tokens` are reached; each is cut to `length`."""
    taken, count = [], 0
    while count < tokens:
        order = list(range(len(documents)))
        rng.shuffle(order)
        for index in order:
            document = documents[index][:length]
            taken.append(document)
            count += len(document)
            if count >= tokens:
                break
    return taken


def pack(documents: list[list[int]], length: int, rng: random.Random, window: int = 400) -> np.ndarray:
    """Pack whole documents into rows, each filled from the next `window` documents."""
    rng.shuffle(documents)
    rows, waiting, position = [], [], 0
    while waiting or position < len(documents):
        while position < len(documents) and len(waiting) < window:
            waiting.append(documents[position])
            position += 1
        row = list(waiting.pop(0))
        while fits := [index for index, document in enumerate(waiting) if len(document) <= length - len(row)]:
            # The longest that fits comes last, the first waiting ones before: rows stay random but full.
            left = length - len(row)
            index = fits[0] if left > length // 3 else max(fits, key=lambda index: len(waiting[index]))
            row += waiting.pop(index)
        rows.append(row + [PAD] * (length - len(row)))
    rng.shuffle(rows)
    return np.array(rows, dtype=np.int16)


def packed(
    sources: dict[str, list[list[str]]],
    encode: Callable[[list[str]], list[list[int]]],
    phases: dict[int, int],
) -> tuple[dict[int, np.ndarray], dict[str, int]]:
    """Return the packed rows of each phase (row length: tokens), and the tokens of each source."""
    ids = {name: encode([render(turns) for turns in turns_list]) for name, turns_list in sources.items()}
    rows, counts = {}, dict.fromkeys(SHARES, 0)
    for length, tokens in phases.items():
        rng = random.Random(length)
        documents = []
        for name, share in SHARES.items():
            taken = stream(ids[name], int(share * tokens), length, rng)
            counts[name] += sum(map(len, taken))
            documents += taken
        rows[length] = pack(documents, length, rng)
    return rows, counts
