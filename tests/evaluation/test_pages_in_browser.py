"""A page in a browser: figures are visible, and tokens and arrows select steps."""

import json
import re
import subprocess

import pytest
from test_pages import Reader, drawn_files, evaluated, read_trace  # noqa: F401

from ctcdraft.report.html import files
from ctcdraft.report.html.explorer import initial_step, most_informative, sorted_answers

# Clicks and key presses of a reader, and what is visible after each, as JSON in the page's title.
VISIT = """
const seen = (one) => { const box = one.getBoundingClientRect(); return box.width > 50 && box.height > 50; };
const unfolded = (one) => one.closest("details.explored").open;
const passes = () => [...document.querySelectorAll(".pass")].filter((one) =>
  getComputedStyle(one).display !== "none" && unfolded(one));
const state = () => ({
  passes: passes().map((one) => one.id),
  marked: [...document.querySelectorAll("a.token.now")].filter(unfolded).map((one) => one.getAttribute("href")),
  parts: passes().flatMap((one) => [...one.querySelectorAll("h5")].map((part) => part.textContent)),
});
const press = (key, more) => document.dispatchEvent(new KeyboardEvent("keydown", { key, ...more }));
const steps = [
  () => document.querySelector('a.token[href="#a0p1"]').click(),
  () => press("ArrowRight"),
  () => press("ArrowLeft"),
  () => press("ArrowRight", { ctrlKey: true }),
  () => { document.querySelectorAll("details.explored")[1].open = true;
          document.querySelector('a.token[href="#a1p0"]').click(); },
  () => press("ArrowLeft"),
  () => document.querySelector('nav a[href="#losslessness"]').click(),
];
const recorded = { figures: [...document.querySelectorAll("figure")].filter((one) => seen(one.querySelector("svg")) &&
  one.querySelectorAll("circle, rect, polyline").length > 3).map((one) => one.id), states: [state()] };
const go_on = () => {
  if (!steps.length) { document.title = JSON.stringify({ ...recorded, hash: location.hash }); return; }
  steps.shift()();
  setTimeout(() => { recorded.states.push(state()); go_on(); }, 50);
};
addEventListener("load", go_on);
"""


@pytest.mark.slow
def test_in_a_browser_every_figure_is_visible_and_tokens_and_arrows_select_steps(evaluated, browser, tmp_path):  # noqa: F811
    """A click on a token shows its step and hides the others of its response; the arrows stop at a response's ends. A
    response in which nothing is chosen shows its initial step."""
    copy = tmp_path / "page.html"
    copy.write_text((evaluated / files.PAGE_FILE).read_text().replace("</body>", f"<script>{VISIT}</script></body>"))
    done = subprocess.run([*browser, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=120)
    titles = ["".join(text) for name, _, text in Reader(done.stdout).elements if name == "title"]
    (recorded,) = [json.loads(title) for title in titles if title[0] == "{"]
    assert recorded["figures"] == [file.stem for file in drawn_files(evaluated)]
    answers = sorted_answers(read_trace(evaluated))
    assert most_informative(answers) == 0
    alone = f"a0p{initial_step(answers[0].passes)}"
    assert [state["passes"] for state in recorded["states"][:-1]] == [
        [alone], ["a0p1"], ["a0p2"], ["a0p1"], ["a0p1"], [alone, "a1p0"], [alone, "a1p0"],
    ]  # fmt: skip
    assert recorded["hash"] == "#losslessness"
    for state in recorded["states"][:-1]:
        shown = [(name, *map(int, re.fullmatch(r"a(\d+)p(\d+)", name).groups())) for name in state["passes"]]
        steps = {name: answers[answer].passes[step] for name, answer, step in shown}
        assert state["marked"] == [f"#{name}" for name, one in steps.items() for _ in range(one.committed)]
        assert state["parts"].count("Frames") == sum(one.frames is not None for one in steps.values())
        assert state["parts"].count("Tree") == sum(len(one.tokens) > 1 for one in steps.values())
        assert state["parts"].count("The base") == len(steps)


@pytest.mark.slow
def test_a_browser_makes_a_picture_of_it(evaluated, browser, tmp_path):  # noqa: F811
    picture = tmp_path / "page.png"
    shot = [f"--screenshot={picture}", "--window-size=1200,2400", (evaluated / files.PAGE_FILE).as_uri()]
    subprocess.run([*browser, *shot], capture_output=True, timeout=120)
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert (int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) == (1200, 2400)
    assert len(content) > 50_000  # an empty one of this size has 15,000
