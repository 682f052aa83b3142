"""An independent count of benchmark questions in a prepared corpus, from its tokens alone.

    python tests/recount_leakage.py PREPARED TOKENIZER QUESTIONS.jsonl ...

It shares no code with decontamination.py: parts are decoded, split at special tokens, and compared word by word. A
question shorter than 13 words is found where special tokens surround each turn; longer ones are found anywhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from truths_corpus import slow_runs


def text_pieces(tokenizer: Any, ids: Iterable[int]) -> Iterator[str]:
    """Yield the texts between special tokens."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for is_special, run in groupby(ids, lambda token: token in special):
        if not is_special:
            yield tokenizer.decode(list(run)).strip()


def recount(folder: Path, tokenizer: Any, questions: Iterable[str], words: int = 13) -> tuple[set[str], set[str]]:
    """Return the user texts and the responses that share a run of words with a question.

    Responses recur in the prompts of later turns; they count as responses there.
    """
    user_texts: set[str] = set()
    base_texts: set[str] = set()
    for part in sorted(folder.glob("part-*.jsonl")):
        for line in map(json.loads, part.read_text().splitlines()):
            start = 0
            for first, end, _ in line.get("spans", ()):
                user_texts.update(text_pieces(tokenizer, line["tokens"][start:first]))
                base_texts.update(text_pieces(tokenizer, line["tokens"][first:end]))
                start = end
    known = slow_runs(questions, words)
    contaminated = [
        {text for text in texts if slow_runs([text], words) & known} for texts in (user_texts - base_texts, base_texts)
    ]
    return contaminated[0], contaminated[1]


def read_questions(path: str) -> Iterator[str]:
    for line in Path(path).read_text().splitlines():
        record = json.loads(line)
        yield from record["turns"] if "turns" in record else [record["question"]]


if __name__ == "__main__":
    import transformers

    folder, base, *files = sys.argv[1:]
    known = [question for file in files for question in read_questions(file)]
    users, answers = recount(Path(folder), transformers.AutoTokenizer.from_pretrained(base), known)
    print(f"{len(known):,} questions: {len(users):,} of them among the prompts, {len(answers):,} in responses")
    sys.exit(bool(users))
