"""Names, prompts and answers in a page stay text, whatever they contain."""

import json
import re
import subprocess
from dataclasses import replace

import pytest
from small_evaluations import evaluate_to, make_evaluation, make_setup
from test_pages import EXPLORER, Reader, evaluated, head, read_trace  # noqa: F401
from tiny_models import random_base

from ctcdraft.corpus.types import Prompt
from ctcdraft.drafters.trees.ctc import PrefixSearch
from ctcdraft.evaluation.trace import trace_from_json, trace_to_json
from ctcdraft.report.html import files
from ctcdraft.report.html.render import render


def test_text_is_never_markup(evaluated, tmp_path):  # noqa: F811
    """Markup in a prompt, a token or a command is shown and not interpreted."""
    evil = '</script><script>alert("1")</script><img src=x>&amp;'
    seen, report = read_trace(evaluated), json.loads((evaluated / "report.json").read_text())
    answers = tuple(replace(one, prompt=evil, id=evil, pieces=(evil,) * len(one.pieces)) for one in seen.answers)
    seen = replace(seen, answers=answers, token_texts=dict.fromkeys(seen.token_texts, evil))
    report["environment"] |= {"command": evil, "base": evil}
    for number, row in enumerate(report["rows"]):
        row["drafter"] = f"{evil}{number}"
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "explorer.json").write_text(trace_to_json(seen))
    page = Reader(files.rebuild_page(tmp_path).read_text())
    assert sum(name == "script" for name, *_ in page.elements) == 1
    assert not any(name == "img" for name, *_ in page.elements)
    assert [evil] in [text for _, _, text in page.elements]


EVIL = (
    "<script>document.title='owned'</script>",
    "</script><script>document.title='owned'</script>",
    "</style></svg></title><img src=x onerror=\"document.title='owned'\">",
    "\"'><svg onload=document.title='owned'>",
    "<!--<iframe srcdoc=\"<script>parent.document.title='owned'</script>\">",
)


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """A page whose drafter names, prompts and responses are markup. A random base does not respond with markup, so its
    tokens are replaced in the trace."""
    path = tmp_path_factory.mktemp("evil")
    setup = make_setup(base := random_base(context=1024))
    setup.contestants.update({name: head(base, PrefixSearch(16)) for name in EVIL})
    prompts = [Prompt(f"{text}{number}", text, (text, text), text) for number, text in enumerate(EVIL[:2])]
    evaluate_to(path, make_evaluation(setup, prompts), trace=EXPLORER)
    seen = trace_from_json((path / "explorer.json").read_text())
    answers = tuple(
        replace(one, pieces=tuple(EVIL[index % len(EVIL)] for index in range(len(one.pieces)))) for one in seen.answers
    )
    texts = {token: EVIL[index % len(EVIL)] for index, token in enumerate(seen.token_texts)}
    (path / "explorer.json").write_text(trace_to_json(replace(seen, answers=answers, token_texts=texts)))
    return files.rebuild_page(path)


def dumped(browser, page):
    """Return the document after its scripts have run."""
    done = subprocess.run([*browser, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("text", EVIL)
def test_in_a_browser_this_markup_runs_where_nothing_escapes_it(browser, tmp_path, text):
    """Otherwise the next test would prove nothing."""
    (tmp_path / "page.html").write_text(f'<title>mine</title><p title="{text}">{text.removeprefix("<!--")}</p>')
    assert "owned</title>" in dumped(browser, tmp_path / "page.html")


def test_in_a_browser_names_prompts_and_answers_stay_text(evil, browser):
    document = dumped(browser, evil)
    title = re.search("<title>(.*?)</title>", document)[1]
    assert title == re.search("<title>(.*?)</title>", evil.read_text())[1]
    assert "owned" not in title
    page = Reader(document)
    assert sum(name == "script" for name, *_ in page.elements) == 1
    assert not {name for name, *_ in page.elements} & {"img", "iframe", "object", "embed"}
    assert not [key for _, attributes, _ in page.elements for key in attributes if key.startswith("on")]
    shown = [" ".join(text) for _, _, text in page.elements]
    assert all(any(text in text for text in shown) for text in EVIL)


def test_templates_escape_text():
    assert "<td>a &lt; b</td>" in render("table", header=["<i>"], rows=[["a < b"]], empty="")
    assert "<i>" not in render("table", header=["<i>"], rows=[["a < b"]], empty="")
    assert render("table", header=[], rows=[], empty="none <b>").strip() == "<p>none &lt;b&gt;</p>"
