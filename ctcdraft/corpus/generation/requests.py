"""Requests to an engine, its responses, and the generation of all turns of a batch of prompts.

    prompts -> samples (`samples` per prompt) -> sorted -> batches; shard i/N takes every N-th batch, whole
                                                           `-> requests for turn 1 of the batch, then for turn 2, ...

A batch needs the responses of no other batch: no shard waits for another, and its content depends neither on the
process that generates it nor on the time. A model in this process generates a batch turn by turn; a server is sent each
conversation's next turn as soon as its last one is answered, across turns and batches (openai.py).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, ClassVar

from ctcdraft import hardware
from ctcdraft.corpus.chat_template import answer_text, chat_messages, fit_to_context, prompt_tokens
from ctcdraft.corpus.lines import Line
from ctcdraft.corpus.types import Prompt
from ctcdraft.errors import InputError, check_float, check_int
from ctcdraft.models.base_model import BaseLM

TOKENIZED_AT_ONCE = 1000  # texts: fast tokenizers encode a list in parallel


class SkipReason(StrEnum):
    """Reasons for skipping a response, as stored in part files."""

    # These sentences are data: the checksums of the parts are the corpus's hash, so that another wording would make
    # another corpus of the same responses. They stay as they were first written.
    NO_EXACT_TEXT = "no text stands for exactly its prompt"
    TEXT_CHANGES = "its text does not survive encoding"
    OTHER_TOKENS = "its text was not said in the words that encoding gives"
    EMPTY_RESPONSE = "nothing was said"
    EARLIER_TURN_SKIPPED = "an earlier turn was dropped"


@dataclass(frozen=True)
class Sample:
    """One prompt to be answered in all its turns; `sample` numbers the samples of a prompt from 0."""

    prompt: Prompt
    sample: int


@dataclass(frozen=True)
class Request:
    """One turn of one sample as token ids; `cut` is how many tokens of its history did not fit into the context."""

    id: str
    turn: int
    sample: int
    category: str
    tokens: array[int]  # four bytes each; a list takes eight beside its integers
    cut: int

    def random_key(self, seed: int) -> int:
        """Return the seed (below 2**56) of this response's random numbers: a hash of seed, prompt, sample and turn."""
        digest = hashlib.sha256(f"{seed}/{self.sample}/{self.turn}/{self.id}".encode()).digest()
        return int.from_bytes(digest[:7], "big")


@dataclass(frozen=True)
class Response:
    """Generated tokens up to and including the stop token. ids: "generated", or "reencoded" from text."""

    tokens: list[int]
    ids: str = "generated"


@dataclass(frozen=True)
class Skipped:
    """No usable response; the later turns of the sample are skipped too."""

    reason: SkipReason


GenerateFn = Callable[[Sequence[Request]], Sequence[Response | Skipped]]


@dataclass(frozen=True)
class GenerationSpeed:
    """Measured speed of a trial."""

    rows: int  # batch size of the trial
    batch: int  # batch size of the corpus
    length: int  # tokens of each prompt of the trial
    read_seconds: float  # per prompt token
    step_seconds: float  # per decoding step of all rows

    def hours(self, read: float, steps: float, share: float = 1.0) -> tuple[float, float]:
        """Return lower and upper bound of the hours for a share of `read` prompt tokens and `steps` decoding steps.

        They are equal if the trial had as many rows as a batch. Otherwise a batch takes at least as long as the trial,
        and at most batch / rows times as long.
        """
        times = self.batch / self.rows
        reading, decoding = (share * one / 3600 for one in (read * self.read_seconds, steps * self.step_seconds))
        return reading / times + decoding, reading + decoding * times

    def describe(self, hours: tuple[float, float], each: str) -> str:
        """Return the bounds as text for the plan. each: inserted after the hours, such as ", shared by 4 processes"."""
        least, most = map(hardware.format_hours, hours)
        if self.rows == self.batch:
            return f"at most about {most}{each} ({self})"
        return (
            f"at most about {least}{each} if {self.batch} rows take no longer than {self.rows}, and {most} if they "
            f"take {self.batch / self.rows:.3g} times as long ({self}; more rows would have taken long to try)"
        )

    def __str__(self) -> str:
        of = "" if self.rows == self.batch else f" of {self.batch}"
        return (
            f"a trial of {self.rows}{of} rows of {self.length:,} tokens: {self.read_seconds * 1e3:.3g} ms per prompt "
            f"token, {self.step_seconds * 1e3:.3g} ms per decoding step of all rows"
        )


@dataclass(frozen=True)
class ResponseGenerator(ABC):
    """Generation settings that all engines share; an engine adds its own and `start`."""

    batch_size: int
    max_new_tokens: int
    temperature: float  # 0 is greedy
    seed: int
    samples: int  # per prompt

    in_process: ClassVar[bool] = False  # whether responses come from the base model loaded in this process

    def __post_init__(self) -> None:
        for key in ("batch_size", "max_new_tokens", "samples"):
            check_int(getattr(self, key), f"answers.{key}")
        check_float(self.temperature, "answers.temperature", least=0)
        if self.samples > 1 and self.temperature == 0:
            raise InputError(
                f"answers.samples={self.samples} at temperature 0 is one answer {self.samples} times; raise "
                "answers.temperature or use answers.samples=1"
            )

    def generation_settings(self) -> dict[str, Any]:
        """Return what must be the same for a corpus to be resumed: the shared settings, but not a server's URL."""
        return {key: value for key, value in asdict(self).items() if key in ResponseGenerator.__dataclass_fields__}

    @abstractmethod
    def start(self, base: BaseLM) -> GenerateFn:
        """Return the function that answers a batch of requests. Called once, before the first batch."""

    def answer_batches(
        self, base: BaseLM, batches: Iterable[tuple[int, Sequence[Sample]]]
    ) -> Iterator[tuple[int, list[Line]]]:
        """Yield each batch's number and part-file lines, in any order; the next batch is taken when it is begun."""
        generator = None
        for number, batch in batches:
            # Not before the first batch: a resumed corpus may need no engine.
            generator = generator or MultiTurnGenerator(base, self.start(base))
            yield number, generator(batch)

    def benchmark_speed(self, base: BaseLM, prompts: Sequence[list[int]]) -> GenerationSpeed | None:
        """Return the speed of a short trial on prompts, one per row of a batch; None where it cannot be measured."""
        return None

    def max_response_tokens(self, base: BaseLM, request: Request) -> int:
        return min(self.max_new_tokens, base.context_length - len(request.tokens))


def batch_samples(tokenizer: Any, prompts: Sequence[Prompt], answers: ResponseGenerator) -> list[list[Sample]]:
    """Return all samples in batches, sorted by descending number of turns, then of tokens."""
    # So the rows of a batch need little padding and end together, and running out of memory happens in the first batch.
    # The id breaks ties: batches do not depend on the order of the prompts.
    lengths: list[int] = []  # of the user turns without the template: enough to sort by
    for start in range(0, len(prompts), TOKENIZED_AT_ONCE):
        texts = ["\n".join(prompt.turns) for prompt in prompts[start : start + TOKENIZED_AT_ONCE]]
        lengths += map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
    order = sorted(range(len(prompts)), key=lambda n: (-len(prompts[n].turns), -lengths[n], prompts[n].id))
    samples = [Sample(prompts[n], sample) for n in order for sample in range(answers.samples)]
    return [samples[start : start + answers.batch_size] for start in range(0, len(samples), answers.batch_size)]


def build_request(base: BaseLM, sample: Sample, responses: Sequence[str]) -> Request:
    """Return the request for the sample's next turn, after the base model's responses so far."""
    prompt = sample.prompt
    whole = prompt_tokens(base.tokenizer, chat_messages(prompt.turns, responses))
    tokens, cut = fit_to_context(whole, base.context_length, base.tokenizer.bos_token_id)
    return Request(prompt.id, len(responses), sample.sample, prompt.category, array("i", tokens), cut)


@dataclass
class MultiTurnGenerator:
    """Generates all turns of a batch, each after the base model's own responses."""

    base: BaseLM
    generate: GenerateFn

    def __call__(self, batch: Sequence[Sample]) -> list[Line]:
        """Return the part-file lines of all turns, sample after sample."""
        responses: list[list[str]] = [[] for _ in batch]
        lines: list[list[Line]] = [[] for _ in batch]
        for turn in range(max(len(sample.prompt.turns) for sample in batch)):
            # Without those that are finished, and those with a skipped response.
            active = [n for n, one in enumerate(batch) if turn < len(one.prompt.turns) and len(responses[n]) == turn]
            requests = [build_request(self.base, batch[n], responses[n]) for n in active]
            replies = self.generate(requests) if requests else []
            for n, request, reply in zip(active, requests, replies, strict=True):
                lines[n].append(self._part_line(request, reply))
                if isinstance(reply, Response):
                    responses[n].append(answer_text(self.base.tokenizer, reply.tokens, self.base.stop_token_ids))
        return [line for n, one in enumerate(batch) for line in lines[n] + skipped_turns(one, len(lines[n]))]

    def _part_line(self, request: Request, reply: Response | Skipped) -> Line:
        key = {"id": request.id, "turn": request.turn, "sample": request.sample, "category": request.category}
        if isinstance(reply, Skipped):
            return key | {"dropped": reply.reason}
        ended = int(reply.tokens[-1] in self.base.stop_token_ids)
        return key | {
            "tokens": [*request.tokens, *reply.tokens],
            "spans": [(len(request.tokens), len(request.tokens) + len(reply.tokens), ended)],
            "cut": request.cut,
            "ids": reply.ids,
        }


def skipped_turns(sample: Sample, first: int) -> list[Line]:
    """Return lines for the turns from `first` on: without the skipped response they have no history."""
    prompt, skipped = sample.prompt, {"dropped": SkipReason.EARLIER_TURN_SKIPPED}
    return [
        {"id": prompt.id, "turn": turn, "sample": sample.sample, "category": prompt.category} | skipped
        for turn in range(first, len(prompt.turns))
    ]
