"""What is asked and who may be asked: batches of dialogues, questions, replies. It knows no engine and no file.

The way from prompts to questions:

    prompts ──► dialogues (one a sample) ──► sorted ──► batches ──► shard i/N takes every N-th batch, whole
                                                          └─► questions: turn 1 of the batch, then its turn 2, ...

A batch goes through all turns of its dialogues before the next one begins. So it needs nobody else's answers: a
shard never waits for another one, and what a batch says does not depend on who asks it, or when.

A batch of dialogues, from the first turn to the last, as the lines of its part. It knows no file and no engine.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

from ctcdraft.corpus.chat_template import answer_text, chat_messages, fit_to_context, prompt_tokens
from ctcdraft.corpus.generation.speed import GenerationSpeed
from ctcdraft.corpus.types import Prompt
from ctcdraft.errors import InputError, check_float, check_int
from ctcdraft.models.base_model import BaseLM


@dataclass(frozen=True)
class Sample:
    """One prompt that is to be answered through all its turns; `sample` counts its dialogues from 0."""

    prompt: Prompt
    sample: int


@dataclass(frozen=True)
class Request:
    """One turn of one dialogue, ready to be asked; `cut` tokens of its history did not fit."""

    id: str
    turn: int
    sample: int
    category: str
    tokens: array[int]
    cut: int

    def random_key(self, seed: int) -> int:
        """A number below 2**56 from seed, prompt, sample and turn: all that an answer's own draws depend on."""
        digest = hashlib.sha256(f"{seed}/{self.sample}/{self.turn}/{self.id}".encode()).digest()
        return int.from_bytes(digest[:7], "big")


@dataclass(frozen=True)
class Response:
    """An answer up to and including its stop token; `ids` says whether they are the `generated` ones or `reencoded`."""

    tokens: list[int]
    ids: str = "generated"


@dataclass(frozen=True)
class Skipped:
    """No answer that could be learnt from, and why; its dialogue ends there."""

    reason: str


GenerateFn = Callable[[Sequence[Request]], Sequence[Response | Skipped]]


@dataclass(frozen=True)
class ResponseGenerator(ABC):
    """How answers are made. An engine adds what it needs to make them, and `start`."""

    batch_size: int
    max_new_tokens: int
    temperature: float  # 0 is greedy
    seed: int
    samples: int  # dialogues a prompt

    in_process: ClassVar[bool] = False  # whether they are made in this process, by the base that is loaded in it

    def __post_init__(self) -> None:
        for key in ("batch_size", "max_new_tokens", "samples"):
            check_int(getattr(self, key), f"answers.{key}")
        if check_float(self.temperature, "answers.temperature") < 0:
            raise InputError(f"answers.temperature={self.temperature} is below 0; 0 is greedy, above it is drawn")
        if self.samples > 1 and self.temperature == 0:
            raise InputError(
                f"answers.samples={self.samples} at temperature 0 is one answer {self.samples} times; raise "
                "answers.temperature or ask for one sample"
            )

    def generation_settings(self) -> dict[str, Any]:
        """What must agree for a corpus to be gone on with; where a server stands, say, need not."""
        return {key: value for key, value in asdict(self).items() if key in ResponseGenerator.__dataclass_fields__}

    @abstractmethod
    def start(self, base: BaseLM) -> GenerateFn:
        """Whoever answers this base's questions, a batch at a time. Called once, when there is something to ask."""

    def benchmark_speed(self, base: BaseLM, prompts: Sequence[list[int]]) -> GenerationSpeed | None:
        """Return how fast such prompts, one for each row of a batch, are answered, by a short trial; None where that
        cannot be tried beforehand."""
        return None

    def max_response_tokens(self, base: BaseLM, question: Request) -> int:
        """How many tokens the answer may have."""
        return min(self.max_new_tokens, base.context_length - len(question.tokens))


def batch_samples(tokenizer: Any, prompts: Sequence[Prompt], answers: ResponseGenerator) -> list[list[Sample]]:
    """All dialogues, in batches: those of most turns first, of these the longest first.

    So the rows of a batch are padded little and end together, and what does not fit in memory fails in the
    first batch. The id breaks ties: batches do not depend on the order in which the prompts came.
    """
    lengths = turn_lengths(tokenizer, prompts)
    order = sorted(range(len(prompts)), key=lambda n: (-len(prompts[n].turns), -lengths[n], prompts[n].id))
    dialogues = [Sample(prompts[n], sample) for n in order for sample in range(answers.samples)]
    return [dialogues[start : start + answers.batch_size] for start in range(0, len(dialogues), answers.batch_size)]


def turn_lengths(tokenizer: Any, prompts: Sequence[Prompt], at_once: int = 1000) -> list[int]:
    """Tokens of every prompt's own turns, without template: enough to sort by, and the tokenizer does many at once."""
    lengths: list[int] = []
    for start in range(0, len(prompts), at_once):
        texts = ["\n".join(prompt.turns) for prompt in prompts[start : start + at_once]]
        lengths += map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
    return lengths


def build_request(base: BaseLM, dialogue: Sample, responses: Sequence[str]) -> Request:
    """The dialogue's next turn, after the base's own answers so far."""
    prompt = dialogue.prompt
    whole = prompt_tokens(base.tokenizer, chat_messages(prompt.turns, responses))
    tokens, cut = fit_to_context(whole, base.context_length, base.tokenizer.bos_token_id)
    return Request(prompt.id, len(responses), dialogue.sample, prompt.category, array("i", tokens), cut)


Line = dict[str, Any]


class MultiTurnGenerator:
    """Asks a batch all its turns, each after the base's own answers; the engine is started by the first batch."""

    def __init__(self, base: BaseLM, answers: ResponseGenerator) -> None:
        self.base = base
        self.answers = answers

    @cached_property
    def _generate(self) -> GenerateFn:
        return self.answers.start(self.base)

    def __call__(self, batch: Sequence[Sample]) -> list[Line]:
        """The lines of all turns, dialogue after dialogue."""
        responses: list[list[str]] = [[] for _ in batch]
        lines: list[list[Line]] = [[] for _ in batch]
        for turn in range(max(len(dialogue.prompt.turns) for dialogue in batch)):
            active = [n for n, one in enumerate(batch) if turn < len(one.prompt.turns) and len(responses[n]) == turn]
            requests = [build_request(self.base, batch[n], responses[n]) for n in active]
            replies = self._generate(requests) if requests else []
            for n, one, reply in zip(active, requests, replies, strict=True):
                lines[n].append(self._part_line(one, reply))
                if isinstance(reply, Response):
                    responses[n].append(answer_text(self.base.tokenizer, reply.tokens, self.base.stop_token_ids))
        return [line for n, one in enumerate(batch) for line in lines[n] + skipped_turns(one, len(lines[n]))]

    def _part_line(self, request: Request, reply: Response | Skipped) -> Line:
        key = {"id": request.id, "turn": request.turn, "sample": request.sample, "category": request.category}
        if isinstance(reply, Skipped):
            return key | {"dropped": reply.reason}
        return key | {
            "tokens": [*request.tokens, *reply.tokens],
            "mask": [0] * len(request.tokens) + [1] * len(reply.tokens),
            "ended": reply.tokens[-1] in self.base.stop_token_ids,
            "cut": request.cut,
            "ids": reply.ids,
        }


def skipped_turns(dialogue: Sample, first: int) -> list[Line]:
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
