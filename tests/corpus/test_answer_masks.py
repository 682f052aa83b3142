"""Answer masks agree with the characters of the text for every template; training with a wrong mask is refused."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from local_data import require_data
from tiny_models import EOS_ID, tiny_tokenizer
from truths_corpus import slow_answer_mask

from ctcdraft.corpus.chat_template import prompt_tokens
from ctcdraft.corpus.generation.requests import MultiTurnGenerator, Response, ResponseGenerator, Sample
from ctcdraft.corpus.lines import join_turns
from ctcdraft.corpus.token_store import Row, generation_prompt_tokens, refuse_wrong_masks, span_mask
from ctcdraft.corpus.types import Prompt
from ctcdraft.errors import InputError
from ctcdraft.models.loading import TEMPLATE_FOLDER, read_chat_template

TINY = Path(__file__).resolve().parents[2] / "data" / "tiny" / "base"
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b c"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
]


def tiny(template: str | None = None, special: tuple[str, ...] = ()):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    if template:
        tokenizer.chat_template = read_chat_template(template)
    return tokenizer


def llama_like(template: str):
    """A SentencePiece tokenizer with <s>, </s> and a vocabulary of 512."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(require_data("CTCDRAFT_MODELS", "stories260K"))
    tokenizer.chat_template = read_chat_template(template)
    return tokenizer


CASES = {
    "tiny": (lambda: tiny(), "<|end|>", ""),
    "chatml": (lambda: tiny("chatml", ("<|im_start|>", "<|im_end|>")), "<|im_end|>", ""),
    "vicuna_v1_1": (lambda: llama_like("vicuna_v1_1"), "</s>", " "),
    "llama2_chat": (lambda: llama_like("llama2_chat"), "</s>", " "),
}


@pytest.fixture(scope="module")
def thousand():
    """Return a thousand real conversations, those of several turns first."""
    folder, talks = require_data("CTCDRAFT_DATA", "sharegpt"), []
    for name in ("mt_bench_101.jsonl", "taskmaster4.jsonl", "oasst_model_eval.jsonl.gz", "lima.jsonl"):
        opened = gzip.open if name.endswith("gz") else open
        with opened(folder / name, "rt", encoding="utf-8") as stream:
            talks += [json.loads(line)["conversations"] for line in itertools.islice(stream, 250)]
    roles = {"human": "user", "gpt": "assistant"}
    return [
        [{"role": roles[turn["from"]], "content": turn["value"].strip()[:400].strip()} for turn in talk[:6]]
        for talk in talks
    ]


def test_all_bundled_templates_are_tested():
    assert {file.stem for file in TEMPLATE_FOLDER.glob("*.jinja")} == set(CASES) - {"tiny"}


@pytest.mark.parametrize("name", CASES)
def test_the_markers_of_the_templates_mark_the_answers(name, thousand):
    """ctcdraft does not use the markers; they are for those who take a template to another trainer."""
    make, end, space = CASES[name]
    tokenizer = make()
    for messages in thousand[::10]:
        marked = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
        )
        assert (marked["input_ids"], marked["assistant_masks"]) == slow_answer_mask(tokenizer, messages, end, space)


@dataclass(frozen=True)
class Script(ResponseGenerator):
    """An engine whose responses are those of the conversation, up to the first stop token."""

    written: Mapping[tuple[str, int], Sequence[int]]

    def start(self, base):
        def ask(questions):
            return [Response(self.response(one, base.stop_token_ids), "generated") for one in questions]

        return ask

    def response(self, request, stops):
        after = self.written[request.id, request.turn][len(request.tokens) :]
        return after[: next(position for position, token in enumerate(after) if token in stops) + 1]


@pytest.mark.parametrize("name", CASES)
def test_the_rows_of_prepare_have_the_mask_of_the_characters(name, thousand):
    """Each row marks its own response; earlier ones belong to the prompt. Text that encoding changes is skipped."""
    make, end, space = CASES[name]
    tokenizer = make()
    base = SimpleNamespace(
        tokenizer=tokenizer, stop_token_ids={tokenizer.convert_tokens_to_ids(end)}, context_length=1 << 20
    )
    compared, joined = set(), 0
    for number, messages in enumerate(thousand):
        pairs = [pair for pair in zip(messages[::2], messages[1::2], strict=False) if pair[1]["role"] == "assistant"]
        if [message for pair in pairs for message in pair] != messages[: 2 * len(pairs)] or not pairs:
            continue
        truths = [slow_answer_mask(tokenizer, messages[: 2 * n + 2], end, space) for n in range(len(pairs))]
        written = {(str(number), turn): ids for turn, (ids, _) in enumerate(truths)}
        prompt = Prompt(str(number), "test", tuple(user["content"] for user, _ in pairs), None)
        lines = MultiTurnGenerator(base, Script(1, 1, 0.0, 0, 1, written).start(base))([Sample(prompt, 0)])
        for line, (ids, mask) in zip(lines, truths, strict=True):
            last = len(mask) - mask[::-1].index(1)
            if line["turn"] and line["tokens"] != ids[:last]:
                continue  # encoding changed an earlier response
            assert line["tokens"] == ids[:last]
            own = last - mask[:last][::-1].index(0) if 0 in mask[:last] else 0
            assert line["spans"] == [(own, last, True)]
            compared.add((number, line["turn"]))
        (row, *others), (ids, mask) = join_turns(lines), truths[-1]
        if len(pairs) > 1 and not others:
            length = row["spans"][-1][1]
            assert span_mask(row["spans"], length).tolist() == mask[:length]
            assert row["tokens"] == ids[:length]
            joined += 1
    assert len({number for number, _ in compared}) == len(thousand)
    assert joined > 300


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "vicuna_v1_1",
            "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
            "detailed, and polite answers to the user's questions. USER: a ASSISTANT: b c</s>USER: d ASSISTANT: e</s>",
        ),
        ("llama2_chat", "<s>[INST] a [/INST] b c </s><s>[INST] d [/INST] e </s>"),
        (
            "chatml",
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb c<|im_end|>\n"
            "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\ne<|im_end|>\n",
        ),
    ],
)
def test_templates_render_what_their_models_were_trained_on(name, text):
    tokenizer = tiny(name)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    begin = "<s>" if name == "vicuna_v1_1" else ""
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == begin + text
    prompt = tokenizer.apply_chat_template(TALK[:3], tokenize=False, add_generation_prompt=True)
    before = {"vicuna_v1_1": " ASSISTANT:", "llama2_chat": " [/INST]", "chatml": "<|im_start|>assistant\n"}[name]
    assert (begin + text).startswith(prompt)
    assert prompt.endswith(before)


def test_a_system_message_has_its_place():
    system = [{"role": "system", "content": "Be kind."}, *TALK[:2]]
    tokenizer = tiny("llama2_chat")
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    rendered = tokenizer.apply_chat_template(system, tokenize=False)
    assert rendered == "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\na [/INST] b c </s>"
    tokenizer.chat_template = read_chat_template("vicuna_v1_1")
    assert tokenizer.apply_chat_template(system, tokenize=False) == "<s>Be kind. USER: a ASSISTANT: b c</s>"


def test_a_template_that_raises_is_one_sentence():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match=r"cannot render a conversation of user \(roles must alternate\)"):
        prompt_tokens(tokenizer, TALK[:1])
    with pytest.raises(InputError, match=r"cannot read the chat template gone.jinja .* chatml, llama2_chat, vicuna"):
        read_chat_template("gone.jinja")


# --- the masks of prepared rows -----------------------------------------------------------------------------


def row(shift=0, ended=True, turns=1, change=None):
    """Return a conversation of responses `yes<|end|>` through the random template; the spans shifted by so many tokens.

    change(spans) returns other spans.
    """
    tokenizer, tokens, spans = tiny_tokenizer(), [], []
    for turn in range(turns):
        talk = [TALK[0], {"role": "assistant", "content": "yes"}] * turn + TALK[:1]
        prompt = prompt_tokens(tokenizer, talk)
        answer = tokenizer("yes<|end|>" if ended else "yes", add_special_tokens=False)["input_ids"]
        assert prompt[: len(tokens)] == tokens
        tokens = prompt + answer
        spans.append((len(prompt) + shift, len(tokens) + min(shift, 0), ended))
    return Row("p1", 0, "test", torch.tensor(tokens, dtype=torch.int32), change(spans) if change else spans)


def refuse(*rows):
    refuse_wrong_masks(rows, tiny_tokenizer(), {EOS_ID})


def test_right_masks_are_accepted():
    assert tiny_tokenizer().decode(generation_prompt_tokens(tiny_tokenizer())) == "<|end|><|assistant|>"
    refuse(row(), row(ended=False), row(turns=3), row(turns=3, ended=False))


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_a_shifted_mask_is_refused(shift, ended, turns):
    with pytest.raises(InputError, match="answer mask of p1 is shifted"):
        refuse(row(), row(shift, ended, turns))


def test_a_later_response_that_is_shifted_is_refused():
    with pytest.raises(InputError, match="answer mask of p1 is shifted: the answer at token 14"):
        refuse(row(turns=2, change=lambda spans: [spans[0], (spans[1][0] + 1, *spans[1][1:])]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda spans: [], "is all zeros"),
        (lambda spans: [(0, spans[-1][1], True)], "is all ones"),
        (lambda spans: [(*spans[0][:1], 99, True)], "has the answer 5 to 99 in a row of 9 tokens"),
        (lambda spans: spans * 2, "has the answer 5 to 9 in a row of 9 tokens, after one to 9"),
        (lambda spans: [(spans[0][0], spans[0][1] - 1, True)], "stops before its end token"),
    ],
)
def test_impossible_spans_are_refused(change, sentence):
    with pytest.raises(InputError, match=f"answer mask of p1 .*{sentence}"):
        refuse(row(change=change))


def test_a_response_that_continues_after_its_end_token_is_refused():
    right = row()
    longer = torch.cat([right.tokens_L, right.tokens_L[-2:]])
    with pytest.raises(InputError, match="continues after its end token"):
        refuse(Row("p1", 0, "test", longer, [(5, 11, True)]))
