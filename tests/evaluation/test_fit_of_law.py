"""The test of the law passes draws from the base, refuses what only looks like them, and is said in the report."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from sessions import PROMPTS, Corrupt, evaluate_to, make_evaluation, make_setup
from tiny_models import random_base, random_lm, tiny_tokenizer

from ctcdraft.decoding.loop import generate
from ctcdraft.decoding.rejection import Rejection, k_sequential, multi_round, residual_distribution
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.tree import NO_TOKEN, TokenTree
from ctcdraft.decoding.verification import TypicalAcceptance, match
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.draft_model import DraftModel
from ctcdraft.drafters.trees import sampled_chains as growths
from ctcdraft.drafters.trees.request import TreeRequest
from ctcdraft.drafters.trees.sampled_labels import SampledLabels
from ctcdraft.evaluation.distribution_test import (
    HISTOGRAM_CELLS,
    MIN_TOKENS_FOR_P_VALUE,
    ChiSquareFit,
    PITHistogram,
    count_pit_values,
    draft_base_ratio,
    draft_distributions,
    pit_histogram,
    pit_interval,
)
from ctcdraft.evaluation.setup import qualified_name
from ctcdraft.models.base_model import BaseLM
from ctcdraft.report import markdown as report_markdown


class Drawn:
    """Frames that depend on the root, over the whole vocabulary."""

    def __init__(self, chains: int, words: int) -> None:
        self.frame_tree = SampledLabels(chains)
        self.words = words

    def draft(self, context, memory, rng):
        seeded = torch.Generator().manual_seed(int(context.root))
        log_probs_TC = (3 * torch.randn(4, self.words + 1, generator=seeded)).log_softmax(-1)
        return self.frame_tree(log_probs_TC, TreeRequest.of(context, (), rng)), None


class Biased(Drawn):
    """Says that what it drew was all but impossible, so that the verifier takes it every time."""

    def draft(self, context, memory, rng):
        tree, _ = super().draft(context, memory, rng)
        laws = tree.draft_probs_NV
        return (tree if laws is None else TokenTree(tree.tokens_N, tree.parents_N, tree.height, laws * 1e-9)), None


def test_intervals_by_pencil():
    probs = torch.tensor([[0.2, 0.5, 0.3], [0.25, 0.5, 0.25]], dtype=torch.float64)
    before, own = pit_interval(probs, torch.tensor([0, 2]), probs)
    assert before.tolist() == pytest.approx([0.8, 0.75])
    assert own.tolist() == pytest.approx([0.2, 0.25])
    draft = torch.tensor([[0.1, 0.1, 0.8], [0.0, 1.0, 0.0]], dtype=torch.float64)  # q / p is 1/2 1/5 8/3, and 0 2 0
    before, own = pit_interval(probs, torch.tensor([0, 2]), draft_base_ratio(draft, probs))
    assert before.tolist() == pytest.approx([0.3, 0.75])
    assert own.tolist() == pytest.approx([0.2, 0.25])


def test_the_fit_by_pencil():
    fit = ChiSquareFit.from_counts([90, 60])
    assert (fit.tokens, fit.chi_square, fit.tv) == (150, 6, 0.1)
    assert fit.p_value == pytest.approx(0.0143059, abs=1e-7)  # of chi-square 6 at one degree of freedom
    assert ChiSquareFit.from_counts([50, 50]).p_value == 1
    assert ChiSquareFit.from_counts([]) is None


def test_a_few_tokens_have_no_p_value():
    """Chi-square's law is a limit: 99 words prove nothing, however they lie."""
    few = ChiSquareFit.from_counts([MIN_TOKENS_FOR_P_VALUE - 1] + [0] * (HISTOGRAM_CELLS - 1))
    assert few.p_value is None
    assert few.chi_square > 1000
    assert ChiSquareFit.from_counts([MIN_TOKENS_FOR_P_VALUE] + [0] * (HISTOGRAM_CELLS - 1)).p_value < 1e-100


# --- rules that are known to be biased, in the shape of decoding.rejection's --------------------------------------


def own_coins(p_NV, q_NV, words_NK, coins_NK):
    """Every draw is judged against the whole p; the first that stands wins."""
    held_NK = (coins_NK * q_NV.gather(1, words_NK.clamp(min=0)) < p_NV.gather(1, words_NK.clamp(min=0))) & (
        words_NK >= 0
    )
    return torch.where(held_NK.any(1), held_NK.int().argmax(1), -1), residual_distribution(p_NV, p_NV - q_NV)


def mixed_stop(p_NV, q_NV, words_NK, coins_NK):
    """Words are judged by the law conditional on going on, and an end draws from what that law leaves of p."""
    total_N1 = q_NV.sum(1, keepdim=True)
    return multi_round(p_NV, torch.where(total_N1 > 0, q_NV / total_N1, 0.0), words_NK, coins_NK)


def told_apart(rule, stop=0.0, draws=3, places=4000, words=48):
    """p-values, by p and by q / p, of words that a rule lets through: drafts near the base, a new pair of laws each."""
    rng = torch.Generator().manual_seed(0)
    log_NV = (2 * torch.randn(places, words, generator=rng, dtype=torch.float64)).log_softmax(-1)
    p_NV = log_NV.exp()
    q_NV = (log_NV + 0.7 * torch.randn(places, words, generator=rng, dtype=torch.float64)).softmax(-1) * (1 - stop)
    full_NV = torch.cat([q_NV, 1 - q_NV.sum(1, keepdim=True).clamp(max=1)], 1)
    words_NK = torch.multinomial(full_NV, draws, replacement=True, generator=rng)
    words_NK = torch.where(words_NK == words, NO_TOKEN, words_NK)
    coins_NK = torch.rand(words_NK.shape, generator=rng, dtype=torch.float64)
    stands_N, rest_NV = rule(p_NV, q_NV, words_NK, coins_NK)
    own_N = torch.multinomial(rest_NV, 1, generator=rng)[:, 0]
    said_N = torch.where(stands_N >= 0, words_NK.gather(1, stands_N.clamp(min=0)[:, None])[:, 0], own_N)
    orders = (p_NV, draft_base_ratio(q_NV, p_NV))
    return [
        ChiSquareFit.from_counts(count_pit_values(p_NV, said_N, keys_NV, random.Random(0))).p_value
        for keys_NV in orders
    ]


@pytest.mark.parametrize(("rule", "stop"), [(multi_round, 0.0), (multi_round, 0.25), (k_sequential, 0.0)])
def test_exact_rules_fit_in_both_orders(rule, stop):
    assert min(told_apart(rule, stop)) > 1e-3


@pytest.mark.parametrize(
    ("rule", "stop", "draws"), [(own_coins, 0.0, 3), (mixed_stop, 0.25, 1)], ids=["own coins", "mixed stop"]
)
def test_biased_rules_are_seen_in_the_order_of_what_the_draft_favours(rule, stop, draws):
    by_base, by_draft = told_apart(rule, stop, draws)
    assert by_draft < 1e-6
    assert by_base > 1e-4  # which is why the other order alone would call them honest


def marks_of(base, drafter, verify, draws, temperature=1.0, lossless=True):
    how = DecodingSettings(24, 12, temperature, 0, 1.0, verify, lossless, token_for_token=False)
    prompt, found = torch.tensor([0, 7, 9]), PITHistogram.empty()
    for seed in range(draws):
        said = generate(base, drafter, prompt, how, frozenset(), seed)
        drafts = draft_distributions(base, drafter, prompt, how, seed, said.tokens) if said.drawn else {}
        found += pit_histogram(base, prompt, said.tokens, how, seed, drafts)
    return found


def fits_of(base, drafter, verify, draws=30):
    found = marks_of(base, drafter, verify, draws)
    assert sum(found.by_base) == 24 * draws
    return [
        fit and fit.p_value
        for fit in (ChiSquareFit.from_counts(found.by_base), ChiSquareFit.from_counts(found.by_draft))
    ]


def test_honest_draws_fit_and_dishonest_ones_do_not():
    base = random_base()
    words = base.vocabulary
    by_base, by_draft = fits_of(base, Autoregressive(base), match)
    assert by_base > 1e-4
    assert by_draft is None
    assert min(fits_of(base, Drawn(1, words), Rejection(multi_round))) > 1e-4
    assert fits_of(base, Biased(1, words), Rejection(multi_round))[0] < 1e-12


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    """A base and a draft model that is nearly it, so that rounds of draws matter."""
    lm = random_lm(seed=0, initializer_range=0.15)
    base = BaseLM(lm, tiny_tokenizer(), "base")
    folder = tmp_path_factory.mktemp("near")
    other = copy.deepcopy(lm)
    rng = torch.Generator().manual_seed(1)
    for value in other.parameters():
        value.data += 0.1 * torch.randn(value.shape, generator=rng)
    other.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return base, str(folder)


def test_through_a_small_model_own_coins_are_seen_and_the_exact_rule_is_not(near):
    base, folder = near
    drafter = DraftModel(base, folder, None, 1, growths.SampledChains(3)).eval()
    assert min(fits_of(base, drafter, Rejection(multi_round), 25)) > 1e-4
    by_base, by_draft = fits_of(base, drafter, Rejection(own_coins), 25)
    assert by_draft < 1e-6
    assert by_base > 1e-4


def test_laws_are_those_the_words_were_drawn_for(near):
    """Place by place: the draft model's own law behind the answer's beginning; none before the prefill's word."""
    base, folder = near
    drafter = DraftModel(base, folder, None, 3, growths.SampledChains(1)).eval()
    how = DecodingSettings(12, 12, 1.0, 0, 1.0, Rejection(multi_round), True, token_for_token=False)
    prompt = torch.tensor([0, 7, 9])
    said = generate(base, drafter, prompt, how, base.stop_token_ids, 3).tokens
    laws = draft_distributions(base, drafter, prompt, how, 3, said)
    with torch.inference_mode():
        logits = drafter.lm.lm(torch.cat([prompt, torch.tensor(said)])[None]).logits[0]
    assert 0 not in laws
    assert len(laws) > 6
    for place, law in laws.items():
        assert law.tolist() == pytest.approx(logits[len(prompt) + place - 1].softmax(-1).tolist(), abs=1e-5)


def test_a_base_with_several_taps_is_marked_as_one_with_the_last_alone():
    base = random_base()
    tapped = BaseLM(base.lm, base.tokenizer, base.name, taps=["last", 1])
    how = DecodingSettings(20, 8, 1.0, 0, 1.0, match, True)
    ours, plain = (pit_histogram(one, torch.tensor([0, 7, 9]), (5, 6, 7, 8), how, 0, {}) for one in (tapped, base))
    assert ours == plain
    assert sum(ours.by_base) == 4


def run(here, path):
    return evaluate_to(path, make_evaluation(here, PROMPTS[:2]))


def with_drawn(drafter, **changes):
    here = make_setup(temperature=1.0, token_for_token=False, max_new_tokens=60, **changes)
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
    assert MIN_TOKENS_FOR_P_VALUE < rows["drawn"]["by_draft"]["tokens"] < rows["drawn"]["tokens"]
    assert rows["autoregressive"]["by_draft"] is None
    for shown in ((tmp_path / "report.md").read_text(), report_markdown.terminal(**made)):
        assert "drawn owes the base's law" in shown
        assert "by what the draft favours" in shown
        assert "LOSS" not in shown.replace("LOSSY: not even", "")
    again = run(here, tmp_path)  # from the lines on disk
    assert again["rows"][-1]["lossless"] == rows["drawn"] | {"owes": "law"}


def test_a_biased_verifier_is_called_what_it_is(tmp_path):
    made = run(with_drawn(Biased(1, 261), verify=Rejection(multi_round)), tmp_path)
    assert "NOT LOSSLESS: drawn owes the base's law" in report_markdown.terminal(**made)


class DrawnOrCorrupt(Drawn):
    """Draws in answers to short prompts; in the others it draws nothing, and has the base read other words."""

    def draft(self, context, memory, rng):
        memory = memory or len(context.tokens_L)
        if memory < 24:
            return super().draft(context, None, rng)[0], memory
        return Corrupt().draft(context, None, rng)[0], memory


def test_who_owes_the_law_still_owes_words_where_nothing_was_drawn(tmp_path):
    here = with_drawn(DrawnOrCorrupt(1, 261), verify=Rejection(multi_round))
    made = run(here, tmp_path)
    lossless = made["rows"][-1]["lossless"]
    assert lossless["owes"] == "law"
    assert lossless["p_value"] is None or lossless["owed"]["wrong"] == 1
    said = report_markdown.terminal(**made)
    assert "NOT LOSSLESS: drawn differs on 1 of 2 questions in answers for which nothing was drawn" in said


def test_a_handful_of_tokens_is_not_judged(tmp_path):
    here = with_drawn(Biased(1, 261), verify=Rejection(multi_round))
    made = run(replace(here, settings=replace(here.settings, max_new_tokens=12)), tmp_path)
    shown = report_markdown.terminal(**made)
    assert "too few to tell" in shown
    assert "NOT LOSSLESS" not in shown


def test_lossy_is_written_in_every_table(tmp_path):
    made = run(with_drawn(Drawn(1, 261), verify=TypicalAcceptance(0.09, 0.3), lossless=False), tmp_path)
    assert [row["lossless"]["owes"] for row in made["rows"]] == ["words", "nothing", "nothing"]
    markdown = (tmp_path / "report.md").read_text()
    lines = [line for line in markdown.split("\n") if line.startswith("| ") and " drawn" in line]
    assert len(lines) >= 5
    assert all("drawn (LOSSY)" in line for line in lines)
    assert "LOSSY: this verifier" in report_markdown.terminal(**made)


def test_at_temperature_0_everybody_owes_the_words(tmp_path):
    here = with_drawn(Drawn(2, 261), verify=Rejection(multi_round))
    made = run(make_setup(**{"verify": here.settings.verify, "token_for_token": False}), tmp_path)
    assert {row["lossless"]["owes"] for row in made["rows"]} == {"words"}
    assert {row["lossless"]["chi_square"] for row in made["rows"]} == {None}


def test_above_temperature_0_the_law_is_looked_at_where_words_are_owed_too(tmp_path):
    """And who says autoregression's words fits as well as it does; who says others in their place does not."""
    made = run(make_setup(temperature=1.0, max_new_tokens=60), tmp_path)
    rows = {row["drafter"]: row["lossless"] for row in made["rows"]}
    assert {lossless["owes"] for lossless in rows.values()} == {"words"}
    assert rows["autoregressive"]["tokens"] > MIN_TOKENS_FOR_P_VALUE
    assert rows["prompt_lookup"]["tv"] == rows["prompt_lookup"]["null_tv"] == rows["autoregressive"]["tv"] > 0
    page = (tmp_path / "report.html").read_text()
    assert page.count(f"<td>{rows['autoregressive']['null_tv']:.4f}</td>") == 2 * len(rows)


def test_a_verifier_is_spelled_the_same_in_every_process():
    assert qualified_name(match) == "ctcdraft.decoding.verification.match"
    assert (
        qualified_name(TypicalAcceptance(0.1, 0.2))
        == "ctcdraft.decoding.verification.TypicalAcceptance(epsilon=0.1, delta=0.2)"
    )
    inner = "ctcdraft.decoding.rejection.multi_round"
    assert qualified_name(Rejection(multi_round)) == f"ctcdraft.decoding.rejection.Rejection(rule={inner})"
