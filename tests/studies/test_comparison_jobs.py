"""Which jobs there are, which of them are settled, and what they are estimated to take."""

from itertools import product

import pytest

from ctcdraft.errors import InputError
from studies.comparison.__main__ import describe_plan
from studies.comparison.config import load_config
from studies.comparison.jobs import CROSSED, Evaluation, Training, ladder_trainings
from studies.comparison.schedule import all_jobs
from studies.comparison.statistics import converged
from studies.comparison.store import ResultStore

NAMES = ("ctc", "ctc_ce", "medusa", "hydra", "eagle")
ENTRANTS = "+entrants={" + ",".join(f"{name}:['drafter={name}']" for name in NAMES) + "}"
SMALL = (
    "~entrants", ENTRANTS, "learning_rates=[0.002,0.004]", "minutes=1", "seeds=[0,1]", "claim_seeds=[]",
    "claims=[[ctc,ctc_ce]]", "measure.again=[ctc,ctc_ce]",
    "ladder={extensions:0,budgets:[2,4],repeated:2,best:2,always:[ctc,ctc_ce],converged:0.02}",
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


def paced(config, rows=None, seconds=lambda job: 0.6 * job.steps):
    """Rows with those of all timed trainings: of 0.6 s per step, 100 steps a minute."""
    rows = rows or {}
    jobs = [job for job in all_jobs(config, rows) if isinstance(job, Training) and job.is_timed]
    return rows | finished(jobs, seconds=seconds)


@pytest.fixture(scope="module")
def config():
    return load_config(["crossed=null", *SMALL])


def test_every_head_tries_every_rate_at_the_first_budget_and_then_takes_the_best(config):
    jobs = all_jobs(config, {})
    assert [job.method for job in jobs if job.settled] == [*NAMES], "without the time of a step nothing else is known"
    rows = paced(config, seconds=lambda job: job.steps * (0.3 if job.method == "eagle" else 0.6))
    trials = of_role(all_jobs(config, rows), "1x")
    assert [(job.method, job.rate) for job in trials] == [(name, rate) for name in NAMES for rate in (0.002, 0.004)]
    assert [job.steps for job in trials] == [100] * 8 + [200] * 2
    assert all(job.settled and job.minutes == 1 for job in trials)
    tau = {job.name: 2.0 + (job.rate if job.method != "eagle" else -job.rate) for job in trials}
    rows = finished(trials, lambda job: tau[job.name]) | {name: rows[name] for name in rows if ".pace." in name}
    timings = of_role(all_jobs(config, rows), "timing")
    assert {(job.method, job.rate, job.settled) for job in timings} == {
        *((name, 0.004, True) for name in NAMES[:-1]), ("eagle", 0.002, True)
    }  # fmt: skip
    assert not any(job.settled for job in of_role(all_jobs(config, rows), "2x"))
    # They take 0.5 s and 0.25 s per step, whatever the trials took: longer trainings go by these.
    rows |= finished(timings, seconds=lambda job: job.steps * (0.25 if job.method == "eagle" else 0.5))
    twice = of_role(all_jobs(config, rows), "2x")
    assert [(job.method, job.rate, job.steps, job.minutes) for job in twice if job.seed == 0] == [
        *((name, 0.004, 240, 2) for name in NAMES[:-1]), ("eagle", 0.002, 480, 2)
    ]  # fmt: skip
    assert all(job.settled for job in twice if job.seed == 0)
    assert not any(job.settled for job in twice if job.seed == 1)
    incomplete = {name: row for name, row in rows.items() if name != "tiny/eagle.timing.s0"}
    assert [job.settled for job in of_role(all_jobs(config, incomplete), "4x") if job.seed == 0] == [True] * 4 + [False]


def test_those_always_taken_and_the_best_others_at_the_longest_budget_are_repeated(config):
    taus = {"ctc": 9.0, "ctc_ce": 1.5, "medusa": 2.0, "hydra": 3.0, "eagle": 2.5}
    rows = paced(config)
    rows |= finished(of_role(all_jobs(config, rows), "1x"))
    for role in ("2x", "4x"):
        heads = [job for job in of_role(all_jobs(config, rows), role) if job.seed == 0]
        assert [job.method for job in heads] == [*NAMES]
        rows |= finished(heads, lambda job: taus[job.method] if job.role == "4x" else -taus[job.method])
    jobs = all_jobs(config, rows)
    repeated = [job for job in jobs if isinstance(job, Training) and job.seed == 1]
    assert [(job.method, job.role) for job in repeated] == [
        *((name, "2x") for name in ("ctc", "ctc_ce", "hydra", "eagle")), ("ctc_ce", "2x_again")
    ]  # fmt: skip
    assert all(job.settled for job in jobs)


def test_an_evaluation_runs_as_soon_as_its_heads_are_trained_and_the_longest_budget_comes_first(config):
    order = [job.name for job in all_jobs(config, paced(config))]
    replay, loop, trained = "tiny/tiny-replay-4x.s0.0", "tiny/tiny-fixed-4x.s0", "tiny/ctc.4x.s0"
    assert max(order.index(replay), order.index(loop)) < order.index(trained) < order.index("tiny/tiny-replay-2x.s0.0")
    assert order.index("tiny/ctc.2x.s1") < order.index("tiny/ctc.2x.s0")


def test_the_second_base_has_the_chosen_heads_at_one_budget_and_its_own_time():
    second = "+bases.second={base:['base=local','base.path=b'],corpus:['corpus=tiny']}"
    config = load_config(["crossed=null", *SMALL, second])

    def of_second(rows):
        return [job for job in ladder_trainings(config, rows) if job.base == "second"]

    jobs = of_second({})
    assert [(job.role, job.seed) for job in jobs] == [("timing", 0), ("2x", 0)] * 4
    assert {job.method for job in jobs} >= {"ctc", "ctc_ce"}
    rows = paced(config, seconds=lambda job: job.steps * (0.1 if job.base == "second" else 0.6))
    assert {job.steps for job in of_second(rows) if job.role == "2x"} == {1200}


def test_cells_take_their_minutes_and_those_that_decide_get_more_seeds():
    config = load_config([*SMALL, "crossed.minutes=1"])
    rows = paced(config, seconds=lambda job: job.steps * (1.0 if "gru" in job.method else 2))
    assert len([name for name in rows if "crossed" in name]) == 24
    jobs = of_role(all_jobs(config, rows), CROSSED)
    assert {job.steps for job in jobs if "gru" in job.method} == {60}
    assert {job.steps for job in jobs if "gru" not in job.method} == {30}
    trials = of_role(all_jobs(config, rows), "crossed_rate")
    losses = ("cross_entropy", "ctc", "prefix_ctc", "prefix_tv")
    corrections = ("none", "markov", "gru")
    deciding = {f"dflash-{loss}-{one}" for loss, one in product(("cross_entropy", "prefix_ctc"), corrections)}
    tuned = {f"one_block-{loss}-none" for loss in losses}
    tuned |= {f"dflash-{loss}-{one}" for loss, one in product(losses, corrections)}
    assert {(job.method, job.steps) for job in trials} == {(name, 15 if "gru" in name else 8) for name in tuned}
    fast = {"one_block-ctc-none", "dflash-cross_entropy-gru"}  # better at the higher rate
    rows |= finished(trials, lambda job: job.rate if job.method in fast else -job.rate)
    cells = of_role(all_jobs(config, rows), CROSSED)
    assert all(job.settled for job in cells)
    higher = {job.method for job in cells if job.rate == 0.004}
    assert higher == {f"one_block-ctc-{one}" for one in corrections} | {"dflash-cross_entropy-gru"}
    assert {job.method for job in cells if job.seed == 1} == deciding
    again = of_role(all_jobs(config, rows), "2x_again")
    assert {(job.head, job.rate, job.steps) for job in again} == {(f"ctc_ce.2x_again.s{n}", 0.008, 60) for n in (0, 1)}
    again = of_role(all_jobs(config, rows), "4x_again")
    assert [(job.head, job.rate, job.steps) for job in again] == [("ctc_ce.4x_again.s0", 0.008, 120)], "the first seed"
    again = of_role(all_jobs(config, rows), "crossed_again")
    assert sorted((job.method, job.rate, job.seed) for job in again) == [
        ("dflash-prefix_ctc-gru", 0.008, n) for n in (0, 1)
    ]
    assert all(job.settled and job.steps == 60 for job in again)
    replays = [job for job in all_jobs(config, rows) if job.name == "tiny/tiny-replay-crossed_again.s0"]
    assert [len(job.heads) for job in replays] == [3], "chain, fixed alignments, prefix search"
    assert "benchmark.limit=50" in replays[0].overrides
    # A minute at the pace that was timed alone, whether a cell has trials or not.
    steps = {job.method: job.steps for job in cells}
    assert {(name.rpartition("-")[2], count) for name, count in steps.items()} == {
        ("none", 30), ("markov", 30), ("gru", 60)
    }  # fmt: skip


def test_null_leaves_a_level_of_the_crossed_table_out():
    table = load_config([*SMALL, "crossed.objective.ctc=null", "crossed.correction.markov=null"]).crossed
    kept = {factor: {cell.levels[factor] for cell in table.cells} for factor in ("body", "objective", "correction")}
    assert kept == {
        "body": {"one_block", "dflash"},
        "objective": {"cross_entropy", "prefix_ctc", "prefix_tv"},
        "correction": {"none", "gru"},
    }
    assert len(table.cells) == 12


def test_evaluations_are_small_groups_of_one_role_with_the_trees_of_a_loss():
    config = load_config([*SMALL, "measure.heads=2"])
    jobs = [job for job in all_jobs(config, {}) if isinstance(job, Evaluation)]
    once = [job for job in jobs if job.kind == "replay" and job.group.startswith("4x.s0")]
    assert [job.heads for job in once] == [
        ("ctc.4x.s0", "ctc_ce.4x.s0"),
        ("medusa.4x.s0", "medusa.4x.s0@sparse"),
        ("hydra.4x.s0", "hydra.4x.s0@medusa63"),
        ("eagle.4x.s0",),
    ]
    assert [job.untrained for job in once] == [("prompt_lookup", "suffix"), (), (), ()]
    timed = [job for job in jobs if job.is_timed]
    assert [(job.kind, job.group, len(job.heads), len(job.untrained)) for job in timed] == [
        ("adaptive", "4x.s0", len(NAMES) + 2, 2), ("fixed", "4x.s0", len(NAMES) + 2, 2),
        ("adaptive_again", "4x.s0", 2, 0), ("fixed_again", "4x.s0", 2, 0),
    ], "speed-ups need one baseline; some are timed twice"  # fmt: skip
    assert ["decoding.nodes=adaptive" in job.overrides for job in timed] == [True, False] * 2
    # A head that diverged is missing in its part, and the other parts stay.
    row = finished([job for job in all_jobs(config, {}) if job.name == "tiny/medusa.4x.s0"], lambda job: 0.0)
    jobs_left = {job.name: job for job in all_jobs(config, row) if isinstance(job, Evaluation)}
    assert jobs_left.keys() == {job.name for job in jobs} - {"tiny/tiny-replay-4x.s0.1"}
    assert jobs_left["tiny/tiny-replay-4x.s0.2"] == once[2]
    cells = {head for job in jobs if job.group.startswith("crossed") for head in job.heads}
    of_cell = [head.partition("@")[2] for head in cells if head.startswith("one_block-cross_entropy-gru.crossed.s0")]
    assert sorted(of_cell) == ["per_frame", "per_frame_chain"]
    of_cell = [head.partition("@")[2] for head in cells if head.startswith("dflash-ctc-none.crossed.s0")]
    assert sorted(of_cell) == ["collapse", "collapse_chain", "prefix_search"]


def test_converged_where_doubling_adds_less_than_the_share_on_every_benchmark():
    def rows(*highs, role="2x to 4x", method="ctc"):
        return [{"base": "tiny", "more": method, "role": role, "gain_high": high} for high in highs]

    def of(*highs):
        return converged(0.02, rows(*highs))["tiny", "ctc", False]

    assert of(0.019, 0.0) == "2x"
    assert of(0.019, 0.021) == "not converged", "one interval reaches beyond"
    assert of(-0.001, 0.01) == "2x"
    assert of(-0.001, -0.05) == "fell"
    found = converged(0.02, rows(0.5, role="1x to 2x") + rows(0.01) + rows(0.9, method="eagle"))
    assert found == {("tiny", "ctc", False): "2x", ("tiny", "eagle", False): "not converged"}, "the last one counts"
    found = converged(0.02, rows(0.9) + rows(0.01, role="2x_again to 4x_again"))
    assert found == {("tiny", "ctc", False): "not converged", ("tiny", "ctc", True): "2x"}, "at the other rate"


def test_the_plan_adds_up_what_is_missing(config, tmp_path):
    store = ResultStore(tmp_path / "out", tmp_path / "results")
    rows = paced(config)
    for row in paced(config, rows | finished(of_role(all_jobs(config, rows), "1x")[:-1])).values():
        store.append_row(row)
    text = describe_plan(config, store)
    assert "done      tiny/ctc.1x-0.002.s0" in text
    assert "0.02 h  tiny/eagle.1x-0.004.s0, 100 steps at 0.004\n" in text
    assert "0.07 h  tiny/ctc.4x.s0, 400 steps at 0.002\n" in text
    assert "0.03 h  tiny/ctc.2x.s1, 200 steps at 0.002 (provisional)" in text
    # One trial; five heads at 2x and 4x, four of them at 2x with another seed, ctc_ce at another rate
    # with two seeds at 2x and one at 4x: 1 + 5 x 6 + 4 x 2 + 2 x 2 + 4 minutes.
    assert "0.8 processor hours" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("stepz=3", "Could not override 'stepz'"),
        ("pace=0", "pace must be an integer >= 1, got 0"),
        ("ladder.repeated=3", r"ladder.repeated must be one of ladder.budgets \(2, 4\), got 3"),
        ("ladder.always=[nothing]", "ladder.always must name some of ctc_gru, .*, got nothing"),
        ("bases.tiny=null", "bases= must name at least one, got none"),
        ("+crossed.deciding.tree=[chain]", "must name levels of body, objective, correction, got tree"),
    ],
)
def test_a_wrong_key_is_refused_in_one_sentence(override, sentence):
    with pytest.raises(InputError, match=sentence):
        load_config([override])
