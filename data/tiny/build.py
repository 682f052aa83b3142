"""The commands that make the embedded base, in order.

    python data/tiny/build.py prompts
    python data/tiny/build.py tokenizer --data DIR
    python data/tiny/build.py train --data DIR --work SCRATCH
    python data/tiny/build.py unloop --data DIR --work SCRATCH
    python data/tiny/build.py report --data DIR

DIR holds `gsm8k/` and `sharegpt/`; SCRATCH gets checkpoints and logs.
"""

import argparse
import json
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
BASE, PROMPTS = HERE / "base", HERE / "prompts"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|user|>\\n' + message['content'] + eos_token + '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def make_prompts(options: argparse.Namespace) -> None:
    """Prompts for training draft heads, held-out ones for measuring them, and others of their kind for calibration."""
    import chat
    import problems
    import tasks
    import twists

    PROMPTS.mkdir(exist_ok=True)
    held_out = frozenset(row["question"] for row in problems.problems("held_out", 60, seed=2026))
    talk = chat.prompts("held_out")
    made = {
        "train": (problems.problems("train", 600, seed=2026), chat.prompts("train")),
        "held_out": (problems.problems("held_out", 60, seed=2026), talk[:60]),
        "validation": (problems.problems("held_out", 28, seed=2027, exclude=held_out), talk[60:]),
    }
    for split, (questions, topics) in made.items():
        lines = [
            {
                "id": f"problem-{n:05d}",
                "category": "word_problem",
                "turns": [row["question"]],
                "reference": row["result"],
            }
            for n, row in enumerate(questions)
        ]
        lines += [{"id": f"chat-{n:05d}", "category": "chat", "turns": [row["prompt"]]} for n, row in enumerate(topics)]
        if split == "train":  # prompts of kinds that the base was not trained on, as those of real users are
            strange = {
                "task": [row["prompt"] for row in tasks.prompts()],
                "twist-problem": twists.problem_prompts(1500, seed=2026),
                "twist-chat": twists.chat_prompts(600, seed=2026),
            }
            lines += [
                {"id": f"{kind}-{number:05d}", "category": kind.split("-")[0], "turns": [prompt]}
                for kind, texts in strange.items()
                for number, prompt in enumerate(texts)
            ]
        (PROMPTS / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"prompts/{split}.jsonl: {len(lines)} prompts")


def make_tokenizer(options: argparse.Namespace) -> None:
    """A byte-level BPE of 4,096 tokens in which every digit is a token of its own."""
    import corpus
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    sources = corpus.conversations(options.data, held_out=False)
    sources["problems"] = sources["problems"][:4142]
    texts = [turn for name, rows in sources.items() for turns in rows[:6000] for turn in turns[:8]]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=corpus.SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<|bos|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(BASE)
    print(f"tokenizer: {len(tokenizer)} tokens, from {sum(map(len, texts)):,} characters")


def load_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BASE)


def encoder(tokenizer):
    """Texts to ids, after a check that the fast rendering is the template's."""
    import corpus

    turns = ["Hello there!", "Hi. 12 + 3 = 15.", "Thanks", "Bye!"]
    messages = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    if tokenizer.apply_chat_template(messages, tokenize=False) != corpus.render(turns):
        raise ValueError("the chat template and corpus.render disagree; make them equal before training")
    return lambda texts: [row.ids for row in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]


def held_out_rows(data: Path, tokenizer, length: int, limit: int) -> dict:
    """Per source, packed rows that training never sees; small sources are read as one."""
    import random

    import corpus

    encode, sources = encoder(tokenizer), corpus.conversations(data, held_out=True)
    groups: dict[str, list[list[int]]] = {}
    for name, rows in sources.items():
        group = name if corpus.SHARES[name] >= 0.02 else "other"
        groups.setdefault(group, []).extend(encode([corpus.render(turns) for turns in rows]))
    rng = random.Random(0)
    return {
        name: corpus.pack([ids[:length] for ids in documents], length, rng)[:limit]
        for name, documents in groups.items()
    }


def train(options: argparse.Namespace) -> None:
    """Train to `--steps`; run again, it goes on from the last checkpoint in `--work`."""
    import corpus
    import numpy as np
    import torch
    import training

    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer()
    stored = {length: options.work / f"rows-{length}.npy" for length in (training.SHORT, training.LONG)}
    if not all(path.exists() for path in stored.values()):
        total = options.steps * training.STEP_TOKENS
        phases = {
            training.SHORT: int(training.SHORT_SHARE * total),
            training.LONG: int((1 - training.SHORT_SHARE) * total),
        }
        sources = corpus.conversations(options.data, held_out=False)
        rows, counts = corpus.packed(sources, encoder(tokenizer), phases)
        for length, path in stored.items():
            np.save(path, rows[length])
            padding = float((rows[length] == corpus.PAD).mean())
            print(f"{length}: {len(rows[length])} rows, {padding:.3%} padding")
        made = {name: {"conversations": len(sources[name]), "tokens": count} for name, count in counts.items()}
        (options.work / "mixture.json").write_text(json.dumps(made, indent=1))
    rows = {length: np.load(path) for length, path in stored.items()}

    def save(model, folder: Path | None) -> None:
        ship(model, tokenizer, folder or BASE)

    held_out = held_out_rows(options.data, tokenizer, training.SHORT, limit=16)
    chosen = {name: getattr(options, name) for name in ("rate", "micro", "every", "stop")}
    chosen |= {"kind": options.optimizer, "workers": options.threads}
    training.train(rows, held_out, options.work, options.steps, save=save, **chosen)


def ship(model, tokenizer, folder: Path) -> None:
    """Model and tokenizer as transformers reads them, in bfloat16."""
    import torch
    import training

    tokenizer.save_pretrained(folder)
    copy = training.new_model().to(torch.bfloat16)
    copy.load_state_dict({name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()})
    copy.generation_config.do_sample = False
    copy.save_pretrained(folder)


def unloop(options: argparse.Namespace) -> None:
    """Continue from the last checkpoint in `--work` with a loss against repetition."""
    import corpus
    import numpy as np
    import torch
    import training
    from unloop import prompt_stream, unloop

    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer()
    model = training.new_model()
    model.load_state_dict(torch.load(options.work / "checkpoint.pt", weights_only=True)["model"])
    sources = corpus.conversations(options.data, held_out=False)
    lines = [json.loads(line) for line in (PROMPTS / "train.jsonl").read_text().splitlines()]
    sources["prompts"] = [line["turns"] for line in lines]  # unfamiliar ones, on which it repeats itself most
    contexts = prompt_stream(sources, corpus.SHARES | {"prompts": 0.2}, encoder(tokenizer), corpus.render)
    closers = {index for word, index in tokenizer.get_vocab().items() if word.endswith((".", "!", "?", "Ċ", '."'))}
    rows = np.load(options.work / f"rows-{training.SHORT}.npy")
    unloop(model, contexts, rows, closers, options.steps, options.work / "unloop.jsonl")
    torch.save({"model": model.state_dict()}, options.work / "unlooped.pt")
    ship(model, tokenizer, BASE)


def report(options: argparse.Namespace) -> None:
    """Held-out loss, ended and repeating answers, accuracy, and ten answers, as Markdown."""
    import measure

    rows = held_out_rows(options.data, load_tokenizer(), 512, limit=10_000)
    measure.report(options.data, options.threads, rows, BASE, PROMPTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    jobs = {"prompts": make_prompts, "tokenizer": make_tokenizer, "train": train, "unloop": unloop, "report": report}
    for name, job in jobs.items():
        verb = verbs.add_parser(name, help=job.__doc__)
        verb.set_defaults(job=job)
        if name != "prompts":
            verb.add_argument("--data", type=Path, required=True, help="folder that holds gsm8k/ and sharegpt/")
            verb.add_argument("--threads", type=int, default=os.cpu_count(), help="in training: processes")
        if name in ("train", "unloop"):
            verb.add_argument("--work", type=Path, required=True, help="folder for checkpoints and logs")
            steps = {"train": 1400, "unloop": 60}[name]
            verb.add_argument("--steps", type=int, default=steps, help="of the training: may be lowered on the way")
        if name == "train":
            verb.add_argument("--stop", type=int, help="stop here without finishing, to go on later")
            verb.add_argument("--optimizer", choices=["muon", "adamw"], default="muon")
            verb.add_argument("--rate", type=float, default=3e-3)
            verb.add_argument("--micro", type=int, default=1024, help="tokens a worker reads at once")
            verb.add_argument("--every", type=int, default=75, help="steps between checkpoints")
    options = parser.parse_args()
    options.job(options)


if __name__ == "__main__":
    main()
