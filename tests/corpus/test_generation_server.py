"""Responses of a server equal those of the base model in this process or are refused; server failures lose nothing."""

import json
import shutil
import ssl
import subprocess

import pytest
from completions_server import serving
from prompts import generated_tokens, make_requests
from tiny_models import EOS_ID, random_base, tiny_tokenizer

from ctcdraft.corpus import prepared
from ctcdraft.corpus.generation.openai import ServedAnswers, reencode_text
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.errors import InputError

PROMPTS = [
    Prompt(f"p{n}", "test", tuple(f"say {n} for turn {turn}" for turn in range(1 + n % 2)), None) for n in range(10)
]
HERE = TransformersAnswers(3, 12, 0.0, 0, 1)
TEXTS = ["a", "How are you today?", "Tell me a story.", "7", "b" * 60]


def lettered_base(seed=0):
    """A random base model of letters, spaces and EOS: the bytes of most random models are not UTF-8."""
    base = random_base(seed=seed)
    letters = base.tokenizer("abcdefghijklmnopqrstuvwxyz ", add_special_tokens=False)["input_ids"]
    others = sorted(set(range(base.vocabulary)) - {*letters, EOS_ID})
    base.lm.lm_head.weight.data[others] = 0.0  # the best of 28 random scores is above 0
    return base


@pytest.fixture(scope="module")
def base():
    return lettered_base()


def served(server, **changes):
    settings = {
        "batch_size": 3, "max_new_tokens": 12, "temperature": 0.0, "seed": 0, "samples": 1, "url": server.url,
        "model": "served", "concurrency": 4, "timeout_s": 20.0, "retries": 2, "backoff_s": 0.01, "key_from": None,
        "checked": 8,
    }  # fmt: skip
    return ServedAnswers(**settings | changes)


def prepare(base, answers, out):
    return prepared.prepare(base, Corpus.from_prompts(PROMPTS), answers, out, {})


def rows(base, path):
    return {(row.id, row.turn): row.tokens_L.tolist() for row in prepared.read_corpus(path, base.fingerprint()).rows}


def prompts_of(*texts):
    return [tiny_tokenizer()(text)["input_ids"] for text in texts]


def ask(answers, base, *texts):
    client = answers.start(base)
    replies = client(make_requests(prompts_of(*texts)))
    client.verify()
    return replies


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_server_gives_the_responses_of_the_base_model_in_this_process(base, with_ids):
    with serving(base, with_ids) as server:
        replies = ask(served(server), base, *TEXTS)
        assert [reply.tokens for reply in replies] == generated_tokens(HERE, base, prompts_of(*TEXTS))
        assert {reply.ids for reply in replies} == {"generated" if with_ids else "reencoded"}
        assert any(EOS_ID in reply.tokens for reply in replies)
        assert {body["path"] for body in server.requests} == {"/v1/completions"}
        sent = sorted(str(body["prompt"]) for body in server.requests[-len(TEXTS) :])
        assert sent == sorted(map(str, prompts_of(*TEXTS) if with_ids else TEXTS))


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_corpus_from_a_server_equals_one_generated_in_this_process(base, tmp_path, with_ids):
    prepare(base, HERE, tmp_path / "here")
    with serving(base, with_ids) as server:
        manifest = prepare(base, served(server), tmp_path / "served")
    assert rows(base, tmp_path / "served") == rows(base, tmp_path / "here")
    counts = manifest["counts"]
    assert (counts["answers"], counts["dropped"]) == (15, 0)
    assert counts["reencoded"] == (0 if with_ids else 15)
    assert manifest["answers"]["model"] == "served"
    assert "url" not in manifest["answers"]  # the server may move to another address


def test_responses_that_change_in_reencoding_are_dropped_with_their_later_turns(tmp_path):
    base = random_base()  # its tokens are bytes
    here = prepare(base, HERE, tmp_path / "here")["counts"]
    with serving(base, with_ids=False) as server:
        counts = prepare(base, served(server), tmp_path / "served")["counts"]
    assert counts["dropped"] > 5
    assert counts["answers"] + counts["dropped"] == here["answers"] == 15
    assert rows(base, tmp_path / "served").items() <= rows(base, tmp_path / "here").items()


def test_at_most_concurrency_requests_run_at_a_time(base, tmp_path):
    with serving(base, True) as server:
        prepare(base, served(server, concurrency=3), tmp_path)
        assert 2 <= server.max_in_flight <= 3


def test_sampled_responses_have_their_own_seed_and_fit_the_distribution(base):
    with serving(base, True) as server:
        drawing = served(server, temperature=1.0, samples=2, batch_size=20)
        questions = make_requests(prompts_of(*TEXTS * 4))
        first = drawing.start(base)(questions)
        assert drawing.start(base)(questions) == first
        assert len({body["seed"] for body in server.requests}) == len(questions)


@pytest.mark.parametrize("trouble", ["500", "hang", "die"])
def test_a_transient_failure_is_retried(base, tmp_path, trouble):
    prepare(base, HERE, tmp_path / "here")
    with serving(base, True) as server:
        server.trouble = lambda number: trouble if number in (2, 7) else None
        manifest = prepare(base, served(server, timeout_s=3.0), tmp_path / "served")
    assert rows(base, tmp_path / "served") == rows(base, tmp_path / "here")
    assert manifest["counts"]["answers"] == len(server.requests) - 2


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [("500", "500: .*out of memory"), ("hang", "no response within 3 s"), ("die", "Server discon|.*reset|.*aborted")],
)
def test_a_lasting_failure_loses_no_finished_part(base, tmp_path, trouble, sentence):
    with serving(base, True) as server:
        prepare(base, served(server), tmp_path / "whole")
        server.requests.clear()
        server.trouble = lambda number: trouble if number >= 9 else None
        with pytest.raises(InputError, match=f"at one request .last: ({sentence}).*run again: finished"):
            prepare(base, served(server, timeout_s=3.0, retries=0, concurrency=1), tmp_path / "cut")
        finished = sorted(tmp_path.glob("cut/part-*"))
        assert len(finished) == 1
        server.trouble = lambda number: None
        before = len(server.requests)
        prepare(base, served(server), tmp_path / "cut")
        asked_again = [body["prompt"] for body in server.requests[before:]]
        lines = [json.loads(line) for part in finished for line in part.read_text().splitlines()]
        assert asked_again
        assert not [line for line in lines if line["tokens"][: line["spans"][0][0]] in asked_again]
    whole, cut = ({one.name: one.read_bytes() for one in tmp_path.glob(f"{name}/*")} for name in ("whole", "cut"))
    assert cut == whole


def test_no_server_at_the_address_is_one_sentence(base):
    with serving(base, True) as server:
        answers = served(server, retries=1)
    sentence = r"server at http://127.0.0.1:\d+/v1 failed 2 times .*refused.*; check the server and run"
    with pytest.raises(InputError, match=sentence):
        ask(answers, base, "a")


@pytest.mark.parametrize(
    ("with_ids", "model", "settings", "sentence"),
    [
        (True, "other", {}, "refuses a request .404: .*no such model.*; check answers.url= and"),
        (False, "other", {}, "refuses a request .404: .*no such model.*; check answers.url= and"),
        (True, "served", {"trouble": lambda number: "nonsense"}, "answers without choices and a text"),
        (False, "served", {"extra_tokens": 1}, "read 2 tokens where the prompt of q0 has 1; it has another tokenizer"),
    ],
)
def test_a_server_of_another_model_api_or_tokenizer_is_one_sentence(base, with_ids, model, settings, sentence):
    with serving(base, with_ids) as server:
        for name, value in settings.items():
            setattr(server, name, value)
        with pytest.raises(InputError, match=sentence):
            ask(served(server, model=model), base, "a")


def test_a_server_of_another_base_model_is_refused(base):
    other = lettered_base(seed=3)
    for temperature in (0.0, 1.0):
        with serving(other, True) as server:
            answers = served(server, temperature=temperature, max_new_tokens=40)
            with pytest.raises(InputError, match=r"the server at .* does not (answer as random-llama: of|sample as)"):
                ask(answers, base, *TEXTS)


@pytest.mark.parametrize("factor", [0.0, 0.3])
def test_a_server_that_changes_the_distribution_is_refused(base, factor):
    """Greedy at any temperature (as `transformers serve` is without do_sample), or at a lower temperature."""
    with serving(base, True) as server:
        server.temperature_factor = factor
        answers = served(server, temperature=4.0, max_new_tokens=100, concurrency=1)
        with pytest.raises(InputError, match=r"does not sample as random-llama does at temperature 4.0: .* nats off"):
            ask(answers, base, *TEXTS)
        ask(served(server, temperature=4.0, max_new_tokens=100, checked=0), base, *TEXTS)


@pytest.mark.parametrize("key", ["open sesame", " open sesame\n"])  # as `export MY_SERVER="$(cat FILE)"` leaves it
def test_the_api_key_is_read_from_the_environment_and_sent(base, monkeypatch, key):
    monkeypatch.setenv("MY_SERVER", key)
    with serving(base, True) as server:
        ask(served(server, key_from="MY_SERVER"), base, "a")
        assert server.requests[-1]["key"] == "Bearer open sesame"
        assert "sesame" not in str(served(server, key_from="MY_SERVER").generation_settings())
        with pytest.raises(InputError, match="key_from=NO_KEY names no variable"):
            served(server, key_from="NO_KEY")
        for name, value in dict(url="localhost:8000", timeout_s=0, retries=-1, concurrency=0, checked=-1).items():
            with pytest.raises(InputError, match=f"answers.{name}.*{value}"):
                served(server, **{name: value})


@pytest.mark.parametrize("key", ["open\nsesame", "s\u00e9same-\u2014", "open\x7fsesame", " \n"])
def test_an_illegal_api_key_is_refused_at_once_without_printing_it(base, monkeypatch, key):
    monkeypatch.setenv("MY_SERVER", key)
    with serving(base, True) as server:
        with pytest.raises(InputError, match=r"answers.key_from=MY_SERVER holds no API key") as refusal:
            ask(served(server, key_from="MY_SERVER", retries=3), base, "a")
        assert "same" not in str(refusal.value)
        assert not server.requests


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make a certificate")
def test_a_certificate_authority_of_the_environment_is_trusted(base, tmp_path, monkeypatch):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with serving(base, True) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url.replace("http:", "https:")
        with pytest.raises(InputError, match="CERTIFICATE_VERIFY_FAILED"):
            ask(served(server, url=url, retries=0), base, "a")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        replies = ask(served(server, url=url, retries=0), base, "a")
        assert [reply.tokens for reply in replies] == generated_tokens(HERE, base, prompts_of("a"))


def test_a_corpus_with_skipped_responses_keeps_its_hash(base, tmp_path):
    """The hash was recorded with version f6d02ee, before the modules were renamed."""

    class Skipping(TransformersAnswers):
        def start(self, base):
            return lambda requests: [reencode_text(base, "ab c", "length", 5) for _ in requests]

    manifest = prepare(base, Skipping(3, 12, 0.0, 0, 1), tmp_path)
    assert manifest["counts"]["dropped"] == 15
    assert manifest["hash"] == "e4ba6b33aaaa209a"
