"""report.html: rendered from two files, self-contained, and every token of a traced response is in it once."""

import json
import re
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import pytest
import torch
from small_evaluations import PROMPTS, evaluate_to, make_evaluation, make_setup
from tiny_models import random_base

from ctcdraft.drafters.parallel import ParallelDrafter
from ctcdraft.drafters.trees.ctc import Collapse, PrefixSearch
from ctcdraft.drafters.trees.sampled import SampledTokens
from ctcdraft.errors import InputError
from ctcdraft.evaluation.records import SAME_DISTRIBUTION
from ctcdraft.evaluation.trace import trace_from_json, trace_to_json
from ctcdraft.evaluation.tracer import TraceSettings
from ctcdraft.nn.bodies import AttentionBody
from ctcdraft.nn.logit_correction import MarkovCorrection
from ctcdraft.report.figures import evaluation_figures
from ctcdraft.report.html import files
from ctcdraft.report.html.explorer import TokenLabels, frame_rows, sorted_answers
from ctcdraft.report.html.render import format_percent

EXPLORER = TraceSettings(questions=2, tokens=12, tokens_per_frame=3)
VOID = ("meta", "br")


def head(base, paths, correction=None):
    torch.manual_seed(0)
    return ParallelDrafter(base, 4, partial(AttentionBody, root_input=True, causal=False), paths, correction).eval()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """An evaluation of heads with frames of every kind and of a drafter without frames."""
    setup = make_setup(base := random_base())
    markov = head(base, PrefixSearch(16), partial(MarkovCorrection, rank=4))
    torch.nn.init.normal_(markov.correction.out.weight)
    setup.contestants.update(ctc=head(base, PrefixSearch(16)), markov=markov, raw=head(base, Collapse(8, 3, 0.4)))
    path = tmp_path_factory.mktemp("pages")
    evaluate_to(path, make_evaluation(setup, PROMPTS[:2]), trace=EXPLORER)
    return path


class Reader(HTMLParser):
    """Elements in order, each with its attributes and its direct text; asserts that every element is closed."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes), []))
        if name not in VOID:
            self.open.append(self.elements[-1])

    def handle_startendtag(self, name, attributes):
        self.elements.append((name, dict(attributes), []))

    def handle_endtag(self, name):
        assert self.open.pop()[0] == name

    def handle_data(self, text):
        if self.open:
            self.open[-1][2].append(text)


@pytest.fixture(scope="module")
def page(evaluated):
    return Reader((evaluated / files.PAGE_FILE).read_text())


def read_trace(evaluated):
    return trace_from_json((evaluated / "explorer.json").read_text())


def test_every_token_is_in_the_page_once_with_its_origin(evaluated, page):
    trace = read_trace(evaluated)
    assert {one.contestant for one in trace.answers} == {"autoregressive", "prompt_lookup", "ctc", "markov", "raw"}
    assert len(trace.answers) == 10
    for number, answer in enumerate(sorted_answers(trace)):
        links = [e for e in page.elements if e[0] == "a" and e[1].get("href", "").startswith(f"#a{number}p")]
        shown = [(attributes["href"], attributes["data-depth"]) for _, attributes, _ in links]
        expected = []
        for index, step in enumerate(answer.passes):
            origins = [*map(str, range(1, len(step.path))), "bonus"][: step.committed]
            expected += [(f"#a{number}p{index}", origin) for origin in origins]
        assert shown == expected
        assert len(shown) + 1 == len(answer.pieces) == 1 + sum(step.committed for step in answer.passes)
        assert [text or ["\N{DOTTED CIRCLE}"] for _, _, text in links] == [
            [piece or "\N{DOTTED CIRCLE}"] for piece in answer.pieces[1:]
        ]
    assert sum(e[1].get("data-depth") == "prefill" for e in page.elements if "style" not in e[1]) == 10 + 1  # a legend


def test_all_methods_give_the_same_tokens_and_frames_are_traced_where_a_drafter_has_them(evaluated):
    seen = read_trace(evaluated)
    for question in {one.id for one in seen.answers}:
        assert len({one.pieces for one in seen.answers if one.id == question}) == 1
    kinds = {one.contestant: {step.frames and step.frames.reads for step in one.passes} for one in seen.answers}
    assert kinds == {
        "autoregressive": {None}, "prompt_lookup": {None}, "ctc": {"alignments"}, "markov": {"alignments"},
        "raw": {"raw frames"},
    }  # fmt: skip
    conditioned = [step for one in seen.answers if one.contestant == "markov" for step in one.passes]
    assert all(len(step.frames.probs) == len(step.path) for step in conditioned)
    for step in conditioned:
        for row in (row for table in step.frames.probs for row in table):
            assert 0 < sum(row) <= 1.01


def test_the_noise_of_margins_is_that_of_rounding(evaluated):
    """A forward pass over the whole text gives the logits of the steps; a wrong tree mask would be far off."""
    for answer in read_trace(evaluated).answers:
        assert 0 <= answer.noise < 1e-3


def test_the_page_loads_nothing(evaluated, page):
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for name, attributes, _ in page.elements:
        assert name not in ("link", "iframe", "img", "object", "embed", "base")
        assert "src" not in attributes
        href = attributes.get("href", "#results")
        assert href.startswith("#")
        assert href[1:] in ids
    assert not re.search(r"@import|url\(|https?:|import\s*\(|fetch\(", (evaluated / files.PAGE_FILE).read_text())


def test_every_figure_is_in_the_page_and_a_file(evaluated, page):
    drawn = [attributes["id"] for name, attributes, _ in page.elements if name == "figure"]
    assert drawn == ["acceptance_by_depth", "acceptance_by_category", "time", "tau_and_draft_time", "reading_by_nodes"]
    for name in drawn:
        svg = (evaluated / files.FIGURES_FOLDER / f"{name}.svg").read_text()
        assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
        Reader(svg)
        assert "nan" not in svg


def test_no_two_of_ten_drafters_share_a_colour_and_a_value_stands_beside_its_name(evaluated):
    """Where dots of one size cover each other, the legend still names them."""
    row = json.loads((evaluated / "report.json").read_text())["rows"][2]
    rows = [row | {"drafter": f"drafter {number}", "v": 1 + number / 8, "mean_nodes": 7.5} for number in range(10)]
    figures = evaluation_figures(rows, None)
    colours = re.findall(r'<rect [^>]*width="12.0" height="12.0" fill="(#\w+)"', figures["reading_by_nodes"].file())
    assert len(set(colours)) == len(colours) == 10
    assert "drafter 7 v(7.5) = 1.88" in figures["reading_by_nodes"].file()


def test_a_long_name_is_not_cut(evaluated):
    """As of a drafter with options: draft_model:path=FOLDER,growth=chain,frames=5."""
    row = json.loads((evaluated / "report.json").read_text())["rows"][2]
    usual = evaluation_figures([row], None)
    for name, figure in evaluation_figures([row | {"drafter": "x" * 60}], None).items():
        assert figure.width >= usual[name].width + 7 * 60 - 190, name


def drawn_files(evaluated):
    """Return the figures in the order of the page."""
    page = (evaluated / files.PAGE_FILE).read_text()
    return sorted((evaluated / files.FIGURES_FOLDER).glob("*.svg"), key=lambda file: page.index(f'id="{file.stem}"'))


def test_a_page_is_rendered_again_from_its_two_files(evaluated, tmp_path):
    for name in ("report.json", "explorer.json"):
        (tmp_path / name).write_text((evaluated / name).read_text())
    assert files.rebuild_page(tmp_path).read_text() == (evaluated / files.PAGE_FILE).read_text()
    (tmp_path / "explorer.json").unlink()
    without = files.rebuild_page(tmp_path).read_text()
    assert "No response was traced here" in without
    assert "was not measured here" in without


def test_a_trace_survives_json(evaluated):
    text = (evaluated / "explorer.json").read_text()
    assert trace_to_json(trace_from_json(text)) == text
    assert trace_from_json(text) == trace_from_json(trace_to_json(trace_from_json(text)))
    assert hash(trace_from_json(text).answers[0].passes)  # tuples all the way down


def test_the_losslessness_section_names_result_and_environment(evaluated):
    text = (evaluated / files.PAGE_FILE).read_text()
    section = text[text.index('id="losslessness"') : text.index('id="definitions"')]
    assert "every method&#39;s tokens equal the baseline&#39;s on all 2 questions" in section
    environment = json.loads((evaluated / "report.json").read_text())["environment"]
    for value in (environment["hardware"], environment["versions"]["torch"], environment["date"]):
        assert value in section
    assert section.count("<td>baseline</td>") == 1
    assert section.count("<td>token-identical</td>") == 4


def test_the_distribution_test_is_shown_where_draft_tokens_are_sampled(evaluated, tmp_path):
    report = json.loads((evaluated / "report.json").read_text())
    fit = {"tokens": 5000, "chi_square": 20.5, "p_value": 0.4, "tv": 0.031, "null_tv": 0.029, "owes": SAME_DISTRIBUTION}
    report["rows"][2]["lossless"] |= fit
    (tmp_path / "report.json").write_text(json.dumps(report))
    text = files.rebuild_page(tmp_path).read_text()
    for cell in ("5,000", "20.5", "0.400", "0.0310", "0.0290"):
        assert f"<td>{cell}</td>" in text


def test_shares_are_formatted_as_percentages():
    assert [format_percent(share) for share in (1, 0.5, 0.019, 3e-5, 4e-12, 0)] == [
        "100 %", "50 %", "1.9 %", "0.003 %", "< 0.001 %", "0.0 %",
    ]  # fmt: skip


def test_the_blank_is_shown_of_ctc_frames_alone(evaluated):
    """Frames that are read token by token have no blank; the others show it below their tokens."""
    frames = next(
        step.frames for one in read_trace(evaluated).answers for step in one.passes if step.frames is not None
    )
    *rows, last = frame_rows(frames, 0, TokenLabels({}))
    assert [label for label, _ in last] == ["\N{GREEK SMALL LETTER EPSILON}"] * frames.frame_count
    assert frame_rows(replace(frames, reads="tokens"), 0, TokenLabels({})) == rows


def test_sampled_drafts_can_be_traced(tmp_path):
    setup = make_setup(base := random_base(), temperature=1.0)
    setup.contestants.update(sampled=head(base, SampledTokens(2)))
    (answer,) = [one for one in EXPLORER.trace_answers(setup, {0: PROMPTS[0]}).answers if one.contestant == "sampled"]
    assert {step.frames.reads for step in answer.passes} == {"tokens"}


def test_a_folder_without_a_report_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"is not a report\.json"):
        files.rebuild_page(tmp_path)
    (tmp_path / "report.json").write_text('{"rows": [], "environment": {}}')
    (tmp_path / "explorer.json").write_text("{}")
    with pytest.raises(InputError, match="is not a trace of the explorer"):
        files.rebuild_page(tmp_path)
