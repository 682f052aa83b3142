"""A batch of dialogues, from the first turn to the last, as the lines of its part. It knows no file and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ctcdraft.base import BaseLM
from ctcdraft.corpus.chat import answer_text
from ctcdraft.corpus.questions import Answers, Ask, Dialogue, Dropped, Question, Reply, question

Line = dict[str, Any]


class Interview:
    """Asks a batch all its turns, each after the base's own answers; the engine is started by the first batch."""

    def __init__(self, base: BaseLM, answers: Answers) -> None:
        self.base = base
        self.answers = answers

    @cached_property
    def _ask(self) -> Ask:
        return self.answers.start(self.base)

    def __call__(self, batch: Sequence[Dialogue]) -> list[Line]:
        """The lines of all turns, dialogue after dialogue."""
        said: list[list[str]] = [[] for _ in batch]
        lines: list[list[Line]] = [[] for _ in batch]
        for turn in range(max(len(dialogue.prompt.turns) for dialogue in batch)):
            talking = [n for n, one in enumerate(batch) if turn < len(one.prompt.turns) and len(said[n]) == turn]
            asked = [question(self.base, batch[n], said[n]) for n in talking]
            replies = self._ask(asked) if asked else []
            for n, one, reply in zip(talking, asked, replies, strict=True):
                lines[n].append(self._line(one, reply))
                if isinstance(reply, Reply):
                    said[n].append(answer_text(self.base.tokenizer, reply.tokens, self.base.stop_token_ids))
        return [line for n, one in enumerate(batch) for line in lines[n] + unasked(one, len(lines[n]))]

    def _line(self, asked: Question, reply: Reply | Dropped) -> Line:
        place = {"id": asked.id, "turn": asked.turn, "sample": asked.sample, "category": asked.category}
        if isinstance(reply, Dropped):
            return place | {"dropped": reply.why}
        return place | {
            "tokens": [*asked.tokens, *reply.tokens],
            "mask": [0] * len(asked.tokens) + [1] * len(reply.tokens),
            "ended": reply.tokens[-1] in self.base.stop_token_ids,
            "cut": asked.cut,
            "ids": reply.ids,
        }


def unasked(dialogue: Dialogue, first: int) -> list[Line]:
    """The turns after one that was dropped: they cannot be asked, and are accounted for."""
    prompt = dialogue.prompt
    return [
        {
            "id": prompt.id,
            "turn": turn,
            "sample": dialogue.sample,
            "category": prompt.category,
            "dropped": "an earlier turn was dropped",
        }
        for turn in range(first, len(prompt.turns))
    ]
