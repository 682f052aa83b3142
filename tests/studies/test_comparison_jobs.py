"""Which jobs there are, which of them are settled, and what they are estimated to take."""

from dataclasses import replace

import pytest

from ctcdraft.errors import InputError
from studies.comparison.__main__ import describe_plan
from studies.comparison.config import load_config
from studies.comparison.jobs import (
    CROSSED,
    Evaluation,
    Training,
    all_jobs,
    cell_steps,
    ladder_trainings,
)
from studies.comparison.measure import estimate
from studies.comparison.statistics import converged_at
from studies.comparison.store import ResultStore

NAMES = ("ctc", "ctc_ce", "medusa", "hydra", "eagle")
ENTRANTS = "+entrants={" + ",".join(f"{name}:['drafter={name}']" for name in NAMES) + "}"
SMALL = (
    "~entrants", ENTRANTS, "learning_rates=[0.002,0.004]", "steps=100", "seeds=[0,1]", "claim_seeds=[]",
    "claims=[[ctc,ctc_ce]]",
    "ladder={trial:0.25,extensions:0,budgets:[2,4],best:2,always:[ctc,ctc_ce],converged:0.02}",
)  # fmt: skip


def finished(jobs, tau=lambda job: 2.0, seconds=lambda job: 0.5 * job.steps):
    """Rows of trainings.csv for these jobs."""
    return {
        job.name: {
            "job": job.name, "base": job.base, "role": job.role, "method": job.method, "seed": job.seed,
            "learning_rate": job.rate, "steps": job.steps, "frames": 4, "parameters": 10, "seconds": seconds(job),
            "tau": tau(job), "loss": 1.0, "commit": "abc", **job.levels,
        }
        for job in jobs
    }  # fmt: skip


def of_role(jobs, role):
    return [job for job in jobs if isinstance(job, Training) and job.role == role]


@pytest.fixture(scope="module")
def config():
    return load_config(["crossed=null", *SMALL])


def test_every_head_tries_every_rate_for_a_quarter_of_the_budget_and_then_takes_the_best(config):
    jobs = all_jobs(config, {})
    trials = of_role(jobs, "rate")
    assert [(job.method, job.rate) for job in trials] == [(name, rate) for name in NAMES for rate in (0.002, 0.004)]
    assert {job.steps for job in trials} == {25}
    assert not any(job.settled for job in jobs if job not in trials)
    rows = finished(trials, lambda job: 2.0 + (job.rate if job.method != "eagle" else -job.rate))
    once = of_role(all_jobs(config, rows), "1x")
    assert [(job.method, job.rate) for job in once if job.seed == 0] == [
        (name, 0.002 if name == "eagle" else 0.004) for name in NAMES
    ]
    assert all(job.settled for job in once if job.seed == 0)
    assert not any(job.settled for job in once if job.seed == 1)
    incomplete = dict(list(rows.items())[:-1])
    assert [job.settled for job in of_role(all_jobs(config, incomplete), "1x") if job.seed == 0] == [True] * 4 + [False]


def test_the_best_by_validation_and_those_always_taken_are_chosen(config):
    taus = {"ctc": 1.0, "ctc_ce": 1.5, "medusa": 2.0, "hydra": 3.0, "eagle": 2.5}
    trials = of_role(all_jobs(config, {}), "rate")
    rows = finished(trials)
    once = [job for job in of_role(all_jobs(config, rows), "1x") if job.seed == 0]
    rows |= finished(once, lambda job: taus[job.method])
    jobs = all_jobs(config, rows)
    for role, steps in (("2x", 200), ("4x", 400)):
        assert [(job.method, job.steps) for job in of_role(jobs, role)] == [
            (name, steps) for name in ("ctc", "ctc_ce", "hydra", "eagle")
        ]
    assert [job.method for job in of_role(jobs, "1x") if job.seed == 1] == ["ctc", "ctc_ce", "hydra", "eagle"]
    assert all(job.settled for job in jobs)


def test_the_second_base_has_the_chosen_heads_at_one_budget():
    second = "+bases.second={base:['base=local','base.path=b'],corpus:['corpus=tiny']}"
    config = load_config(["crossed=null", *SMALL, second])
    jobs = [job for job in ladder_trainings(config, {}) if job.base == "second"]
    assert {(job.role, job.seed) for job in jobs} == {("1x", 0)}
    assert {job.method for job in jobs} >= {"ctc", "ctc_ce"}
    assert len(jobs) == 4


def test_cells_take_their_minutes_and_those_that_decide_get_more_seeds():
    cell = "crossed.minutes=1"
    config = load_config([*SMALL, cell])
    rows = finished(of_role(all_jobs(config, {}), "pace"), seconds=lambda job: 24 * (1.0 if "gru" in job.method else 2))
    assert len(rows) == 24
    jobs = of_role(all_jobs(config, rows), CROSSED)
    assert {job.steps for job in jobs if "gru" in job.method} == {60}
    assert {job.steps for job in jobs if "gru" not in job.method} == {30}
    trials = of_role(all_jobs(config, rows), "crossed_rate")
    assert {(job.method, job.steps) for job in trials} == {
        (f"one_block-{loss}-none", 8) for loss in ("cross_entropy", "ctc", "prefix_ctc", "prefix_tv")
    }
    rows |= finished(trials, lambda job: job.rate if "-ctc-" in job.method else -job.rate)
    cells = [job for job in of_role(all_jobs(config, rows), CROSSED) if job.seed == 0]
    assert all(job.rate == (0.004 if job.levels["objective"] == "ctc" else 0.002) for job in cells)
    best = {"dflash-ctc-gru": 5.0, "one_block-ctc-gru": 4.0, "dflash-prefix_ctc-none": 3.5, "dflash-ctc-none": 3.0,
            "one_block-cross_entropy-none": 2.0, "one_block-prefix_tv-markov": 1.5}  # fmt: skip
    rows |= finished(cells, lambda job: best.get(job.method, 1.0))
    jobs = of_role(all_jobs(config, rows), CROSSED)
    assert {job.method for job in jobs if job.seed == 1} == set(best), "the best of each loss, and the two best others"
    assert all(job.settled for job in jobs)


def test_evaluations_are_small_groups_of_one_role_with_the_trees_of_a_loss():
    config = load_config([*SMALL, "measure.heads=2"])
    jobs = [job for job in all_jobs(config, {}) if isinstance(job, Evaluation)]
    once = [job for job in jobs if job.kind == "replay" and job.group.startswith("1x.s0")]
    assert [job.heads for job in once] == [
        ("ctc.1x.s0", "ctc_ce.1x.s0"),
        ("medusa.1x.s0", "hydra.1x.s0"),
        ("eagle.1x.s0",),
    ]
    assert [job.untrained for job in once] == [("prompt_lookup", "suffix"), (), ()]
    timed = [job for job in jobs if job.kind == "loop"]
    assert [(job.group, len(job.heads)) for job in timed] == [("1x.s0", len(NAMES))], "speed-ups need one baseline"
    assert all("decoding.nodes=adaptive" in job.overrides for job in timed)
    cells = {head for job in jobs if job.group.startswith("crossed") for head in job.heads}
    of_cell = [head.partition("@")[2] for head in cells if head.startswith("one_block-cross_entropy-gru.crossed.s0")]
    assert sorted(of_cell) == ["per_frame", "per_frame_chain"]
    of_cell = [head.partition("@")[2] for head in cells if head.startswith("dflash-ctc-none.crossed.s0")]
    assert sorted(of_cell) == ["collapse", "collapse_chain", "prefix_search"]


def test_converged_where_doubling_adds_less_than_the_share():
    def rows(*taus):
        return [{"steps": 100 * 2**number, "tau": tau} for number, tau in enumerate(taus)]

    assert converged_at(100, 0.02, rows(2.0, 2.3, 2.32)) == "2x"
    assert converged_at(100, 0.02, rows(2.0, 2.03, 2.32)) == "not converged"
    assert converged_at(100, 0.02, rows(2.0, 2.03, 2.05)) == "1x"
    assert converged_at(100, 0.02, rows(2.0, 0.0)) == "-", "the second one diverged"
    assert converged_at(100, 0.02, rows(2.0, 2.3, 2.6)) == "not converged"
    assert converged_at(100, 0.02, rows(2.0)) == "-"


def test_a_training_is_estimated_from_its_own_method_else_from_the_mean_of_others(config):
    medusa, eagle = (
        job for job in of_role(all_jobs(config, {}), "rate") if job.rate == 0.002 and job.method in "medusa eagle"
    )
    assert estimate(config, medusa, {}, {}) == (None, False)
    rows = finished([medusa], seconds=lambda job: 2.0 * job.steps)
    assert estimate(config, replace(medusa, steps=400), rows, {}) == (800.0, True)
    assert estimate(config, eagle, rows, {}) == (50.0, False)
    cells = load_config([*SMALL, "crossed.minutes=2"])
    trial, cell = (of_role(all_jobs(cells, rows), role)[0] for role in ("crossed_rate", CROSSED))
    assert [estimate(cells, job, rows, {}) for job in (trial, cell)] == [(30.0, False), (120.0, False)]


def test_the_plan_adds_up_what_is_missing(config, tmp_path):
    store = ResultStore(tmp_path / "out", tmp_path / "results")
    trials = of_role(all_jobs(config, {}), "rate")
    for row in finished(trials, seconds=lambda job: 36.0 * job.steps).values():
        store.append_row(row)
    text = describe_plan(config, store)
    assert "done      tiny/ctc.rate-0.002.s0" in text
    assert "1.00 h  tiny/medusa.1x.s0, 100 steps at 0.002\n" in text
    assert "4.00 h  tiny/ctc.4x.s0, 400 steps at 0.002 (provisional) (longer than 100 minutes)" in text
    # 5 heads at 1x, then 4 of them at another seed, 2x and 4x
    assert "33.0 processor hours" in text.splitlines()[-1]


def test_steps_of_a_cell_are_unknown_before_it_is_timed():
    config = load_config(list(SMALL))
    pace = of_role(all_jobs(config, {}), "pace")[0]
    assert cell_steps(config, {}, pace) == (100, False)
    assert cell_steps(config, finished([pace], seconds=lambda job: 12.0), pace) == (1200, True)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("stepz=3", "Could not override 'stepz'"),
        ("steps=0", "steps must be an integer >= 1, got 0"),
        ("ladder.trial=2", "ladder.trial must be above 0 and at most 1, got 2"),
        ("ladder.always=[nothing]", "ladder.always must name some of ctc_gru, .*, got nothing"),
        ("bases.tiny=null", "bases= must name at least one, got none"),
        ("crossed.deciding.best_of_each=tree", "must be one of body, objective, correction"),
    ],
)
def test_a_wrong_key_is_refused_in_one_sentence(override, sentence):
    with pytest.raises(InputError, match=sentence):
        load_config([override])
