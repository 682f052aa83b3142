"""Answers by a server that speaks OpenAI's completions, held to the base's own law. It knows nothing of files.

Completions, not chat: there alone the prompt is ours to the token, so that a corpus from a server is what the base
in this process would have made. A server is asked in the best way it understands:

    by ids     vLLM, SGLang, llama.cpp: the prompt's ids; vLLM gives the answer's ids back too
    by text    `transformers serve`: text that the tokenizer turns into exactly the prompt's ids

Where no ids come back the text is encoded again, and an answer of which that could not be what was generated is
dropped and counted: unless decode(encode(text)) == text, with as many ids as the server says it generated.

Whether answers are this base's own: another model behind a name, or a law that is bent. It knows no server.

A server may serve other weights, cut the law (top-k and penalties out of a model's generation config) or answer
greedily whatever the temperature. Nothing of that shows in the text; all of it shows in the base's own law.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ctcdraft.corpus.generation.http import JSONClient, RefusedError, map_concurrently
from ctcdraft.corpus.generation.requests import GenerateFn, Request, Response, ResponseGenerator, Skipped
from ctcdraft.errors import InputError
from ctcdraft.models.base_model import BaseLM

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # a character cut in the middle: encoded again, it would look well

RequestBody = dict[str, Any]
RequestFormat = Callable[[BaseLM, Request, "ServedAnswers"], RequestBody | Skipped]


@dataclass(frozen=True)
class ServedAnswers(ResponseGenerator):
    """The server at `url` answers, `concurrency` questions of a batch at a time."""

    url: str
    model: str
    concurrency: int
    timeout_s: float
    retries: int
    backoff_s: float
    key_from: str | None
    checked: int  # answers of the first batch that the base must recognise as its own

    def __post_init__(self) -> None:
        super().__post_init__()
        self.server()
        if self.concurrency < 1 or self.checked < 0:
            raise InputError(
                f"answers.concurrency={self.concurrency} and answers.checked={self.checked} are impossible; the first "
                "is 1 or more, the second 0 or more"
            )

    def server(self) -> JSONClient:
        return JSONClient(self.url, self.timeout_s, self.retries, self.backoff_s, self.key_from)

    def law(self) -> dict[str, Any]:
        return super().generation_settings() | {"model": self.model}

    def start(self, base: BaseLM) -> GenerateFn:
        return OpenAIClient(base, self)


@dataclass
class OpenAIClient:
    """One server and what has been agreed with it: how to ask, and that its answers are the base's."""

    base: BaseLM
    answers: ServedAnswers
    request_formats: list[RequestFormat] = field(
        default_factory=lambda: [token_id_request, text_request]
    )  # the first is used; the best one first
    verified: bool = False

    def __call__(self, requests: Sequence[Request]) -> list[Response | Skipped]:
        if self.verified:
            return map_concurrently(self._generate, requests, self.answers.concurrency)
        replies = [
            self._probe_request_format(requests[0]),
            *map_concurrently(self._generate, requests[1:], self.answers.concurrency),
        ]
        pairs = [
            (list(question.tokens), reply.tokens)
            for question, reply in zip(requests, replies, strict=True)
            if isinstance(reply, Response)
        ]
        server = f"the server at {self.answers.url}"
        refuse_mismatched_responses(self.base, pairs[: self.answers.checked], self.answers.temperature, server)
        self.verified = bool(pairs)
        return replies

    def _probe_request_format(self, question: Request) -> Response | Skipped:
        """Ask one question alone, and give up a way of asking that the server refuses."""
        while len(self.request_formats) > 1:
            try:
                return self._generate(question, threading.Event())
            except RefusedError:
                self.request_formats.pop(0)
        return self._generate(question, threading.Event())

    def _generate(self, question: Request, given_up: threading.Event) -> Response | Skipped:
        body = self.request_formats[0](self.base, question, self.answers)
        if isinstance(body, Skipped):
            return body
        answer = self.answers.server().post("/completions", body, given_up)
        try:
            choice = answer["choices"][0]
            text, ids, ending = choice["text"], choice.get("token_ids"), choice.get("finish_reason")
            usage = answer.get("usage") or {}
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"the server at {self.answers.url} answers without choices and a text; check that answers.url= ends "
                "where /completions follows"
            ) from error
        read = usage.get("prompt_tokens")
        if read is not None and read != len(question.tokens):
            raise InputError(
                f"the server at {self.answers.url} read {read} tokens where the prompt of {question.id} has "
                f"{len(question.tokens)}; it has another tokenizer, or adds a begin token: serve {self.base.name} there"
            )
        if ids is not None:
            return with_stop_token(self.base, list(ids), ending, "generated")
        return reencode_text(self.base, text, ending, usage.get("completion_tokens"))


def token_id_request(base: BaseLM, question: Request, answers: ServedAnswers) -> RequestBody:
    """Everything said, so that no default of the model's or of the server's bends the law."""
    return common_request(base, question, answers) | {
        "prompt": list(question.tokens),
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": sorted(base.stop_token_ids),
        "return_token_ids": True,
    }


def text_request(base: BaseLM, question: Request, answers: ServedAnswers) -> RequestBody | Skipped:
    """Only what the protocol has. The text must lead the same tokenizer back to the same ids."""
    for ids in (question.tokens, question.tokens[1:]):  # without the begin token, which many tokenizers add
        text = base.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        if base.tokenizer(text, verbose=False)["input_ids"] == list(question.tokens):
            return common_request(base, question, answers) | {"prompt": text}
    return Skipped("no text stands for exactly its prompt")


def common_request(base: BaseLM, question: Request, answers: ServedAnswers) -> RequestBody:
    return {
        "model": answers.model,
        "max_tokens": answers.max_response_tokens(base, question),
        "temperature": answers.temperature,
        "top_p": 1.0,
        "seed": question.random_key(answers.seed) % 2**31,  # some servers take no more
    }


def reencode_text(base: BaseLM, text: str, ending: str | None, generated: int | None) -> Response | Skipped:
    """The ids of a text, if they can be those that were generated."""
    ids = list(base.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if REPLACEMENT_CHARACTER in text or base.tokenizer.decode(ids, skip_special_tokens=True) != text:
        return Skipped("its text does not survive encoding")
    # Servers count the stop token or do not.
    ended = ending == "stop"
    if generated is not None and generated not in ((len(ids), len(ids) + 1) if ended else (len(ids),)):
        return Skipped("its text was not said in the words that encoding gives")
    return with_stop_token(base, ids, ending, "reencoded")


def with_stop_token(base: BaseLM, ids: list[int], ending: str | None, origin: str) -> Response | Skipped:
    """With its stop token, which a server may keep to itself. Of several the tokenizer's own is taken."""
    if ending == "stop" and base.stop_token_ids and (not ids or ids[-1] not in base.stop_token_ids):
        own = base.tokenizer.eos_token_id
        ids = [*ids, own if own in base.stop_token_ids else min(base.stop_token_ids)]
    return Response(ids, origin) if ids else Skipped("nothing was said")


MIN_GREEDY_AGREEMENT = 0.9  # of greedy words; in bfloat16 a near-tie falls otherwise now and then
MAX_EXCESS_NATS = 0.1  # nats a word between what draws cost and what they should, and ...
MAX_DEVIATIONS = 6.0  # ... this many standard deviations, so that few words prove nothing


def refuse_mismatched_responses(
    base: BaseLM, pairs: Sequence[tuple[list[int], list[int]]], temperature: float, source: str
) -> None:
    """Raise InputError if `source` cannot be this base at this temperature; pairs: prompts and what was answered.

    Greedy: nearly every word must be the base's likeliest. Drawn: the words must on average be as unlikely as
    the law says that its draws are, which is its entropy.
    """
    likely, excess, variance, tokens = 0, 0.0, 0.0, 0
    for prompt, answer in pairs:
        log_probs_LV = response_log_probs(base, prompt, answer, temperature or 1.0)
        tokens += len(answer)
        tokens_L = torch.tensor(answer, device=log_probs_LV.device)
        likely += int((log_probs_LV.argmax(dim=-1) == tokens_L).sum())
        probs_LV = log_probs_LV.exp()
        entropy_L = -(probs_LV * log_probs_LV).sum(dim=-1)
        excess += float((-log_probs_LV.gather(1, tokens_L[:, None])[:, 0] - entropy_L).sum())
        variance += float(((probs_LV * log_probs_LV**2).sum(dim=-1) - entropy_L**2).sum())
    if not tokens:
        return
    if temperature == 0 and likely < MIN_GREEDY_AGREEMENT * tokens:
        raise InputError(
            f"{source} does not answer as {base.name}: of {tokens} words that it said greedily the base would "
            f"say {likely}; serve this base, without penalties, or choose the base= that is served"
        )
    if temperature > 0 and abs(excess) > max(MAX_EXCESS_NATS * tokens, MAX_DEVIATIONS * variance**0.5):
        raise InputError(
            f"{source} does not draw as {base.name} does at temperature {temperature}: its words cost "
            f"{excess / tokens:+.2f} nats more each than the base's own draws; serve this base, without top-k, top-p "
            "or "
            "penalties of its own"
        )


@torch.inference_mode()
def response_log_probs(base: BaseLM, prompt: list[int], answer: list[int], temperature: float) -> Tensor:
    """The base's log-probabilities_LV of every word of the answer's, in float64."""
    tokens_BL = torch.tensor([[*prompt, *answer[:-1]]], device=base.device)
    states_BLD = base.hidden_states(tokens_BL, torch.ones_like(tokens_BL))
    logits_LV = base.head(states_BLD[0, len(prompt) - 1 :, : base.width])
    return (logits_LV.double() / temperature).log_softmax(dim=-1)
