"""The test of the law passes draws from the base, refuses what only looks like them, and is said in the report."""

from __future__ import annotations

import pytest
import torch
from sessions import PROMPTS, arena, session
from tiny_models import random_base

from ctcdraft.decoding.loop import Settings, generate
from ctcdraft.decoding.rejection import Rejection, multi_round
from ctcdraft.decoding.tree import TokenTree
from ctcdraft.decoding.typical import Typical
from ctcdraft.decoding.verify import match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.drawn_paths import DrawnLabels
from ctcdraft.evaluation import report
from ctcdraft.evaluation.folder import Folder
from ctcdraft.evaluation.law import Fit, added, interval, marks
from ctcdraft.evaluation.session import spelled
from ctcdraft.shard import Shard


class Drawn:
    """Frames that depend on the root, over the whole vocabulary."""

    def __init__(self, chains: int, words: int) -> None:
        self.paths = DrawnLabels(chains)
        self.words = words

    def draft(self, context, memory, rng):
        seeded = torch.Generator().manual_seed(int(context.root))
        log_probs_TC = (3 * torch.randn(4, self.words + 1, generator=seeded)).log_softmax(-1)
        return self.paths(log_probs_TC, context.root, context.depth, context.nodes, (), rng), None


class Biased(Drawn):
    """Says that what it drew was all but impossible, so that the verifier takes it every time."""

    def draft(self, context, memory, rng):
        tree, _ = super().draft(context, memory, rng)
        laws = tree.draft_probs_NV
        return (tree if laws is None else TokenTree(tree.tokens_N, tree.parents_N, tree.height, laws * 1e-9)), None


def test_intervals_by_pencil():
    probs = torch.tensor([[0.2, 0.5, 0.3], [0.25, 0.5, 0.25]], dtype=torch.float64)
    before, own = interval(probs, torch.tensor([0, 2]))
    assert before.tolist() == pytest.approx([0.8, 0.75])
    assert own.tolist() == pytest.approx([0.2, 0.25])


def test_the_fit_by_pencil():
    fit = Fit.of([30, 10])
    assert (fit.tokens, fit.chi_square, fit.tv) == (40, 10, 0.25)
    assert fit.p_value == pytest.approx(0.0015654, abs=1e-7)  # of chi-square 10 at one degree of freedom
    assert Fit.of([20, 20]).p_value == 1
    assert Fit.of([]) is None


def fit_of(base, drafter, verify, temperature=1.0, lossless=True, draws=60):
    how = Settings(24, 8, temperature, 0, 1.0, verify, lossless, token_for_token=False)
    prompt = torch.tensor([0, 7, 9])
    cells = [
        marks(base, prompt, generate(base, drafter, prompt, how, frozenset(), seed).tokens, how, seed)
        for seed in range(draws)
    ]
    fit = Fit.of(added(cells))
    assert fit.tokens == 24 * draws
    return fit


def test_honest_draws_fit_and_dishonest_ones_do_not():
    base = random_base()
    words = base.vocabulary
    assert fit_of(base, Autoregressive(base), match).p_value > 1e-4
    assert fit_of(base, Drawn(1, words), Rejection(multi_round)).p_value > 1e-4
    assert fit_of(base, Biased(1, words), Rejection(multi_round)).p_value < 1e-12


def run(here, path):
    return session(here, PROMPTS[:2]).run(Folder(path, Shard(1, 1)), False, 4, 1)


def with_drawn(drafter, **changes):
    here = arena(temperature=1.0, token_for_token=False, **changes)
    here.contestants["drawn"] = drafter
    return here


def test_the_report_says_who_owes_what(tmp_path):
    here = with_drawn(Drawn(2, 261), verify=Rejection(multi_round))
    made = run(here, tmp_path)
    rows = {row["drafter"]: row["lossless"] for row in made["rows"]}
    assert {name: lossless["owes"] for name, lossless in rows.items()} == {
        "autoregressive": "words", "prompt_lookup": "words", "drawn": "law",
    }  # fmt: skip
    assert rows["prompt_lookup"]["equal"] == 2
    assert rows["drawn"]["tv"] > 0
    assert rows["drawn"]["null_tv"] == rows["autoregressive"]["tv"]
    assert rows["drawn"]["tokens"] == made["rows"][-1]["tokens"] + 3  # with the prefill's, in each of three turns
    for shown in ((tmp_path / "report.md").read_text(), report.terminal(**made)):
        assert "drawn owes the base's law" in shown
        assert "LOSS" not in shown.replace("LOSSY: not even", "")
    again = run(here, tmp_path)  # from the lines on disk
    assert again["rows"][-1]["lossless"] == rows["drawn"] | {"owes": "law"}


def test_a_biased_verifier_is_called_what_it_is(tmp_path):
    made = run(with_drawn(Biased(1, 261), verify=Rejection(multi_round)), tmp_path)
    assert "NOT LOSSLESS: drawn owes the base's law" in report.terminal(**made)


def test_lossy_is_written_in_every_table(tmp_path):
    made = run(with_drawn(Drawn(1, 261), verify=Typical(0.09, 0.3), lossless=False), tmp_path)
    assert [row["lossless"]["owes"] for row in made["rows"]] == ["words", "nothing", "nothing"]
    markdown = (tmp_path / "report.md").read_text()
    lines = [line for line in markdown.split("\n") if line.startswith("| ") and " drawn" in line]
    assert len(lines) >= 5
    assert all("drawn (LOSSY)" in line for line in lines)
    assert "LOSSY: this verifier" in report.terminal(**made)


def test_at_temperature_0_everybody_owes_the_words(tmp_path):
    here = with_drawn(Drawn(2, 261), verify=Rejection(multi_round))
    made = run(arena(**{"verify": here.settings.verify, "token_for_token": False}), tmp_path)
    assert {row["lossless"]["owes"] for row in made["rows"]} == {"words"}
    assert {row["lossless"]["chi_square"] for row in made["rows"]} == {None}


def test_a_verifier_is_spelled_the_same_in_every_process():
    assert spelled(match) == "ctcdraft.decoding.verify.match"
    assert spelled(Typical(0.1, 0.2)) == "ctcdraft.decoding.typical.Typical(epsilon=0.1, delta=0.2)"
    inner = "ctcdraft.decoding.rejection.multi_round"
    assert spelled(Rejection(multi_round)) == f"ctcdraft.decoding.rejection.Rejection(rule={inner})"
