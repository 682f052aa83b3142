"""Drafters that copy: suffix decoding against the authors' code and by hand, and copying of a source in the prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_files import load_golden
from hydra.errors import InstantiationException
from small_evaluations import PROMPTS, evaluate_to, make_evaluation, make_setup, replay_to
from test_training_equals_decoding import HOW
from tiny_models import random_base
from truths_trees import texts

from ctcdraft.config.contestants import build_contestant, resolve
from ctcdraft.corpus import prepared
from ctcdraft.corpus.generation.transformers import TransformersAnswers
from ctcdraft.corpus.types import Corpus, Prompt
from ctcdraft.decoding.loop import Context, generate
from ctcdraft.distributed import Shard
from ctcdraft.drafters.autoregressive import Autoregressive
from ctcdraft.drafters.merged import Merged
from ctcdraft.drafters.prompt_lookup import PromptLookup
from ctcdraft.drafters.suffix import MOST_OCCURRENCES, PastResponses, SuffixDecoding
from ctcdraft.errors import InputError
from ctcdraft.evaluation.replay.calibration import choose_adaptive
from ctcdraft.evaluation.replay.evaluation import ReplayEvaluation
from ctcdraft.evaluation.replay.tree_size import TreeSizeSearch

RNG = torch.Generator()


def suffix(past=(), ngram=64, factor=1.0, offset=0.0, min_prob=0.1, most_tokens=10_000, remember=False):
    responses = [np.array(response) for response in past]
    return SuffixDecoding(None, ngram, factor, offset, min_prob, lambda base: responses, most_tokens, remember)


def context(tokens, nodes=16, remaining=99):
    return Context(torch.tensor(tokens), torch.zeros(1, 4), remaining, nodes)


def draft(drafter, prompt, response, **limits):
    """Return the draft after a prompt and a response, and how probable each path is."""
    _, memory = drafter.draft(context(prompt + response[:1]), None, RNG)
    tree, _ = drafter.draft(context(prompt + response, **limits), memory, RNG)
    return dict(zip(texts(tree), tree.path_probs_N.tolist()[1:], strict=True))


def listed(row):
    return [token for token in row.tolist() if token >= 0]


def test_drafts_are_those_of_the_authors_suffix_tree():
    golden, compared = load_golden("suffix"), 0
    for case in range(len(golden["scores"])):
        nodes, factor, offset, least = golden["settings"][case].tolist()
        past = [listed(row) for row in golden["past"][case] if listed(row)]
        drafter = suffix(past, 64, round(factor, 3), round(offset, 3), round(least, 3))
        prompt, response = listed(golden["prompts"][case]), listed(golden["responses"][case])
        ours = draft(drafter, prompt, response, nodes=int(nodes) + 1)
        probs = golden["probs"][case].tolist()
        assert sorted(ours.values(), reverse=True) == pytest.approx([prob for prob in probs if prob > 0], abs=1e-6)
        assert sum(ours.values()) == pytest.approx(float(golden["scores"][case]), abs=1e-5)
        theirs: list[tuple[int, ...]] = [()]
        for token, parent in zip(listed(golden["tokens"][case]), golden["parents"][case].tolist(), strict=False):
            theirs.append((*theirs[parent], token))
        # Of equally probable tokens at the limit any may be drafted.
        lowest = min(ours.values(), default=0.0)
        probable = {text for text, prob in ours.items() if prob > lowest}
        assert probable == {text for text, prob in zip(theirs[1:], probs, strict=False) if prob > lowest + 1e-6}
        compared += len(probable)
    assert compared > 50


def test_a_draft_by_hand():
    """After 1 2: 3 4 twice, 3 5 once and 6 once; the run itself is the fifth occurrence."""
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 6, 0, 1, 2, 3, 4, 0]
    assert draft(suffix(factor=1.5), prompt, [9, 1, 2]) == {(3,): 0.6, (3, 4): 0.4, (3, 4, 0): 0.4}
    assert draft(suffix(offset=2.0), prompt, [9, 1, 2]) == {(3,): 0.6, (3, 4): 0.4, (3, 4, 0): 0.4, (6,): 0.2}
    assert list(draft(suffix(factor=2.0, min_prob=0.5), prompt, [9, 1, 2])) == [(3,)]
    assert list(draft(suffix(factor=2.0), prompt, [9, 1, 2], nodes=3)) == [(3,), (3, 4)]
    assert list(draft(suffix(factor=2.0), prompt, [9, 1, 2], remaining=2)) == [(3,), (6,)]  # depth 1
    assert list(draft(suffix(ngram=1, factor=1.0), prompt, [9, 1, 2])) == [(3,)]
    assert draft(suffix(), [1, 2, 3], [7]) == {}
    tree, _ = suffix(factor=2.0).draft(replace(context([*prompt, 9, 1, 2]), min_path_prob=0.3), None, RNG)
    assert texts(tree) == [(3,), (3, 4), (3, 4, 0)]


def test_past_responses_count_with_the_response_but_not_with_the_prompt():
    past = [[1, 2, 8], [1, 2, 8]]
    assert draft(suffix(past), [5], [1, 2])[(8,)] == pytest.approx(2 / 3)  # of two and the run itself
    assert draft(suffix(past), [5, 1], [2])[(8,)] == 1.0  # the run begins in the prompt: it is not one of the responses
    assert draft(suffix(past), [1, 2, 7], [1, 2]) == {(7,): 0.5, (7, 1): 0.5}  # a larger sum than 8 alone
    assert draft(suffix([[4, 1], [2, 8]]), [5], [1, 2]) == {(8,): 0.5}  # no run across two responses
    assert draft(suffix([[6, 1]]), [5], [6, 1]) == {}  # nothing follows the end of a response


def test_the_newest_past_responses_are_kept():
    responses = [np.array([token] * 3) for token in range(9)]
    kept = PastResponses.of(responses, 7)
    assert [token for token in range(9) if kept.runs(np.array([4, token]), 3)] == [0, 1, 2]
    assert [kept.runs(np.array([8, 1, 1]), 3)[size].tolist() for size in (1, 2)] == [[5, 6, 7], [6, 7]]
    assert kept.content_hash not in ("", PastResponses.of(responses, 3).content_hash)
    assert PastResponses.of((), 7).content_hash == ""
    frequent = [[1, 2]] * MOST_OCCURRENCES + [[1, 3]] * MOST_OCCURRENCES
    assert list(draft(suffix(frequent, factor=2.0), [5], [7, 1])) == [(2,), (3,)]  # of a token alone some of all places
    assert list(draft(suffix(frequent), [5], [7, 1])) == [(2,)]


def test_remembered_responses_are_those_to_other_prompts():
    drafter, other = suffix(remember=True), suffix()
    for one in (drafter, other):
        draft(one, [5, 6], [1, 2, 8, 9])
    assert draft(other, [5, 7], [1, 2]) == {}
    assert draft(drafter, [5, 7], [1, 2])[(8,)] == 0.5
    assert draft(drafter, [5, 6], [1, 2]) == {}  # not its own response, decoded once more
    short = suffix(remember=True, most_tokens=4)
    for token in range(9):
        draft(short, [5, token], [1, 2, 8])
    assert [prompt for prompt, *_ in short.decoded.items()] == [np.array([5, n]).tobytes() for n in (7, 8)]


def test_the_responses_of_a_prepared_corpus_are_copied(tmp_path):
    base, answers = random_base(), TransformersAnswers(3, 20, 0.0, 0, 1)
    prompts = [Prompt(f"p{n}", "test", ("first" + "!" * n, "second"), None) for n in range(3)]
    prepared.prepare(base, Corpus.from_prompts(prompts), answers, tmp_path, {})
    contestant, alone = (
        build_contestant(resolve({"suffix": {"responses": {"path": path}}}), base) for path in (str(tmp_path), None)
    )
    assert contestant.drafter.content_hash in contestant.identity
    assert alone.drafter.content_hash == ""
    how = replace(HOW, max_new_tokens=20)
    for row in prepared.read_corpus(tmp_path, base.fingerprint()).rows:
        (start, end, _), tokens_L = row.spans[-1], row.tokens_L.long()
        prompt, response = tokens_L[:start], tuple(tokens_L[start:end].tolist())
        copied, plain = (generate(base, one.drafter, prompt, how, frozenset(), 0) for one in (contestant, alone))
        assert copied.tokens[: len(response)] == plain.tokens[: len(response)] == response
        assert len(copied.passes) < len(plain.passes)
    with pytest.raises(InstantiationException, match="holds answers of random-llama, but this run's base is"):
        build_contestant(resolve({"suffix": {"responses": {"path": str(tmp_path)}}}), random_base(seed=1))


def test_responses_are_remembered_by_an_evaluation_of_one_process_without_a_stop(tmp_path):
    def setup():
        plain = make_setup()
        merged = Merged(plain.base, plain.contestants["prompt_lookup"], suffix(remember=True))
        return replace(plain, contestants={**plain.contestants, "merged": merged})

    def outcome(folder):
        report = evaluate_to(tmp_path / folder, make_evaluation(setup()))
        return [(row["tau"], row["lossless"]["equal"]) for row in report["rows"]]

    assert outcome("once") == outcome("again")
    for folder, shard in (("once", None), ("shard", Shard(1, 2))):
        longer = make_evaluation(setup(), [*PROMPTS, replace(PROMPTS[0], id="more")], shard)
        with pytest.raises(InputError, match="merged has remember=true and drafts from the responses it has decoded"):
            evaluate_to(tmp_path / folder, longer)
    with pytest.raises(InputError, match="which a replay does not decode"):
        replay_to(tmp_path / "replay", make_evaluation(setup()), ReplayEvaluation([4], 1))
    sizing = TreeSizeSearch([2, 4], "absent", 2, 1, 8, 1, adaptive_nodes=[4, 8], shown=2, costs=None)
    with pytest.raises(InputError, match="which a replay does not decode"):
        choose_adaptive(setup(), sizing, PROMPTS, PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_copied_drafts_are_lossless(temperature):
    base, how = random_base(), replace(HOW, temperature=temperature, max_new_tokens=40)
    prompts = [torch.tensor([0, 7, 9, 30, 7, 9, 30, 7]), torch.arange(30, 60).repeat(2)]
    truths = [generate(base, Autoregressive(base), prompt, how, frozenset(), 1).tokens for prompt in prompts]
    drafters = [suffix(truths[:1], remember=True), suffix(truths), PromptLookup(base, 4, 8, prompt_only=True)]
    for drafter in drafters:
        for prompt, truth in zip(prompts, truths, strict=True):
            assert generate(base, drafter, prompt, how, frozenset(), 1).tokens == truth
    assert len(generate(base, drafters[1], prompts[0], how, frozenset(), 1).passes) < 20


def test_a_source_is_copied_on_behind_a_difference():
    """The response repeats the source but for 23, which becomes 50. Alone 24 would also be found at the beginning."""
    prompt = [9, 24, 3, 20, 21, 22, 23, 24, 25, 26, 24, 8]
    copying, lookup = PromptLookup(None, 8, 4, prompt_only=True), PromptLookup(None, 8, 4)
    memory, response, drafts, last = None, [20, 21, 22, 50, 24], [], []
    for end in range(1, len(response) + 1):
        now = context(prompt + response[:end])
        tree, memory = copying.draft(now, memory, RNG)
        drafts.append(tree.tokens_N.tolist()[1:])
        last.append(lookup.draft(now, None, RNG)[0].tokens_N.tolist()[1:])
    assert drafts == [[21, 22, 23, 24], [22, 23, 24, 25], [23, 24, 25, 26], [], [25, 26, 24, 8]]
    assert last[-1] == [8, 20, 21, 22]  # the latest occurrence, as prompt lookup takes it
    tree, memory = copying.draft(context([*prompt, *response, 25, 26, 24]), memory, RNG)
    assert tree.tokens_N.tolist()[1:] == [8]  # and no further than the prompt
    # Nothing behind the position: the last place before it.
    assert copying.draft(context([*prompt, *response, 9]), memory, RNG)[0].tokens_N.tolist()[1:] == [24, 3, 20, 21]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"ngram": 0}, r"suffix\.ngram must be an integer >= 1, got 0"), ({"min_prob": 0}, r"suffix\.min_prob must be")],
)
def test_impossible_values_are_refused(changes, sentence):
    with pytest.raises(InputError, match=sentence):
        suffix(**changes)
