"""What report.html shows before anything is clicked: an informative step, and no table column cut off."""

import json
import re
import subprocess
from dataclasses import replace
from html import unescape

import pytest

from ctcdraft.evaluation.trace import (
    Trace,
    TraceAnswer,
    TraceStep,
    trace_from_json,
    trace_to_json,
)
from ctcdraft.report.html.explorer import explorer_section, initial_step, most_informative
from ctcdraft.report.html.files import rebuild_page
from studies.results import unpack


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return unpack("demo", tmp_path_factory.mktemp("demo")) / "held_out"


def make_step(accepted, drafted, stopped=False):
    """A chain of `drafted` draft tokens of which the first ones are accepted. stopped: the answer ends inside it."""
    tokens = tuple(range(drafted + 1))
    path = tokens[: accepted + 1]
    committed = accepted if stopped else accepted + 1
    return TraceStep(tokens, tuple(range(-1, drafted)), path, 99, committed, drafted, ((99, 0.5),), None)


UNDRAFTED, ACCEPTED, REJECTED = make_step(0, 0), make_step(3, 3), make_step(0, 3)
PARTLY, MOSTLY, ENDED = make_step(1, 3), make_step(2, 4), make_step(3, 4, stopped=True)


def answer(contestant, *passes):
    return TraceAnswer("q", "talk", contestant, "?", ("x",) * (1 + sum(one.committed for one in passes)), passes, 0.0)


@pytest.mark.parametrize(
    ("passes", "place"),
    [
        (
            (UNDRAFTED, ACCEPTED, REJECTED, PARTLY, MOSTLY, MOSTLY),
            4,
        ),  # the first of those that accepted most before a rejection
        ((ACCEPTED, REJECTED), 1),  # a rejection rather than many accepted
        ((UNDRAFTED, PARTLY, ACCEPTED, PARTLY), 1),
        ((UNDRAFTED, make_step(1, 1), ACCEPTED), 2),  # none was rejected: the most accepted
        ((PARTLY, ENDED), 0),  # tokens after the end were not verified
        ((UNDRAFTED, UNDRAFTED), 0),
    ],
)
def test_a_response_opens_with_its_most_informative_step(passes, place):
    assert initial_step(passes) == place


def test_a_response_without_steps_is_named():
    assert initial_step(()) is None
    page = explorer_section(Trace({}, (answer("ctc"),)))
    assert "The prefill gave the whole response." in page


def test_the_page_opens_the_first_drafter_with_a_rejected_token():
    """Every response shows one step at first; the unfolded response is the first with a rejected token."""
    answers = (
        answer("autoregressive", UNDRAFTED, UNDRAFTED),
        answer("lookup", UNDRAFTED, ACCEPTED),
        answer("ctc", ACCEPTED, PARTLY),
        answer("medusa", PARTLY),
    )
    page = explorer_section(Trace({}, answers))
    assert re.findall(r'<section id="(\w+)" class="pass opening">', page) == ["a0p1", "a1p1", "a2p0", "a3p0"]
    summaries = re.findall(r'<details class="explored"( open)?><summary>(\w+) on', page)
    assert summaries == [("", "lookup"), (" open", "ctc"), ("", "medusa"), ("", "autoregressive")]
    assert most_informative(answers[:2]) == 0


MEASURE = """
const boxes = () => [document.documentElement, ...document.querySelectorAll("body *")].filter((one) =>
  getComputedStyle(one).display !== "inline" && !(one instanceof SVGElement) && one.clientWidth > 0);
const cut = () => boxes().filter((one) => one.scrollWidth > one.clientWidth).map((one) =>
  [one.tagName, String(one.className), one.textContent.slice(0, 40), one.scrollWidth, one.clientWidth]);
addEventListener("load", () => {
  const shown = [...document.querySelectorAll("details[open] .pass")].filter((one) =>
    one.getBoundingClientRect().height > 100);
  const recorded = { width: innerWidth, opens: shown.map((one) => one.id) };
  document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  setTimeout(() => {
    recorded.next = location.hash;
    for (const one of document.querySelectorAll("details")) one.open = true;
    for (const one of document.querySelectorAll(".pass")) one.style.display = "block";
    document.title = JSON.stringify({ ...recorded, boxes: boxes().length, cut: cut() });
  }, 100);
});
"""


def measured(page, browser, tmp_path):
    """Return what a browser 1,280 pixels wide measures in a page with all steps unfolded."""
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</body>", f"<script>{MEASURE}</script></body>"))
    command = [*browser, "--window-size=1280,1000", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return json.loads(unescape(re.search(r"<title>(\{.*?)</title>", done.stdout, re.S)[1]))


@pytest.mark.slow
def test_the_demo_opens_on_a_step_and_no_column_is_cut_at_1280_pixels(browser, demo, tmp_path):
    for name in ("report.json", "explorer.json"):
        (tmp_path / name).write_text((demo / name).read_text())
    layout = measured(rebuild_page(tmp_path), browser, tmp_path)
    assert layout["width"] == 1280
    (opened,) = layout["opens"]
    answer, step = map(int, re.fullmatch(r"a(\d+)p(\d+)", opened).groups())
    assert layout["next"] == f"#a{answer}p{step + 1}"  # the arrows go on from what is shown
    assert layout["boxes"] > 1000
    assert layout["cut"] == []


@pytest.mark.slow
def test_long_values_wrap(browser, demo, tmp_path):
    """Names with values in them, deep drafts, many divergences, and ten frames."""
    report = json.loads((demo / "report.json").read_text())
    for number, row in enumerate(report["rows"][1:]):
        row["drafter"] = f"draft_model:path=a_folder_with_a_long_name/{number},growth=chain,frames=5"
        row["alpha"] = [0.123] * 40
        row["benchmark"] = "a_long_name_of_questions"
        row["lossless"] |= {"first_divergence_margins": [1e-5] * 40, "equal": 80, "rounding": 40}
    report["environment"]["command"] = "python evaluate.py contestants=[" + "runs/one_of_many," * 20 + "]"
    (tmp_path / "report.json").write_text(json.dumps(report))
    seen = trace_from_json((demo / "explorer.json").read_text())
    texts = {token: f"{text}ward" for token, text in seen.token_texts.items()}
    wide = [replace(one, passes=tuple(map(widened, one.passes))) for one in seen.answers]
    (tmp_path / "explorer.json").write_text(trace_to_json(Trace(texts, tuple(wide))))
    assert measured(rebuild_page(tmp_path), browser, tmp_path)["cut"] == []


def widened(step: TraceStep) -> TraceStep:
    """Return the step with ten frames in place of fewer."""
    if step.frames is None:
        return step
    probs = tuple((table * 10)[:10] for table in step.frames.probs)
    return replace(step, frames=replace(step.frames, probs=probs))
