"""A diagnosis of a simulated job is judged by kind, place and price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.eventsim import report
from judges.eventsim.causes import SlowWorkers, When
from judges.eventsim.model import Network, Shape
from judges.eventsim.truth import mean_step_s, truths, without
from judges.eventsim.uneven import SkewedData
from judges.judging import ACCEPTED, BLAMES_NOBODY, judge
from tests.judges.test_eventsim import exact
from tracekit.analysis.detectors.detector import own_detectors

SHAPE = Shape(dp=4, pp=1, microbatches=4, steps=3)
NOWHERE: dict[str, Any] = {"workers": [], "host": None, "links": [], "dp_ranks": [], "pp_ranks": [], "steps": []}


def at(*cells: tuple[int, int]) -> dict[str, Any]:
    return NOWHERE | {"workers": [{"dp_rank": dp, "pp_rank": pp} for dp, pp in cells]}


def reported(*causes: tuple[str, dict[str, Any], float], fixes: tuple = ()) -> dict[str, Any]:
    """The judged part of a report's JSON."""
    return {
        "slowdown": 1.2,
        "trust": {"trustworthy": True},
        "causes": [
            {"kind": kind, "where": where, "where_text": "there", "saved_s": saved_s, "since_step": None}
            for kind, where, saved_s in causes
        ],
        "fixes": [
            {
                "kind": kind, "title": kind, "where": where, "saved_s": saved_s, "bound": False, "withheld": None,
                "details": {},
            }
            for kind, where, saved_s in fixes
        ],
    }  # fmt: skip


@pytest.fixture
def slow_job():
    return exact(shape=SHAPE, causes=(SlowWorkers(frozenset({(2, 0)}), 1.5),))


def test_the_right_worker_at_the_right_price(slow_job):
    found = tuple(truths(slow_job))
    saved_s = mean_step_s(slow_job) - mean_step_s(without(slow_job, *slow_job.causes))
    one = judge(slow_job, found, reported(("bad-worker", at((2, 0)), saved_s), ("healthy", NOWHERE, 0.0)))
    assert (len(one.right), one.wrong, one.missed) == (1, (), ())
    assert one.cause_errors == pytest.approx([0.0])


def test_another_place_or_another_kind_is_wrong_and_the_worker_missed(slow_job):
    for kind, where, misplaced in (
        ("bad-worker", at((1, 0)), True),
        ("bad-worker", at((1, 0), (2, 0)), True),
        ("bad-worker", NOWHERE, True),
        ("congestion", NOWHERE, False),
    ):
        one = judge(slow_job, tuple(truths(slow_job)), reported((kind, where, 0.01)))
        assert [(cause.kind, cause.misplaced) for cause in one.wrong] == [(kind, misplaced)]
        assert [truth.kind for truth in one.missed] == ["bad-worker"], (kind, where)


def test_one_answer_may_list_several_workers():
    slow = tuple(SlowWorkers(frozenset({(dp, 0)}), 1.5) for dp in (1, 2))
    job = exact(shape=Shape(dp=4, pp=2, microbatches=4, steps=2), causes=slow)
    found = tuple(replace(truth, saved_s=1.0) for truth in truths(job))
    one = judge(job, found, reported(("bad-worker", at((1, 0), (2, 0)), 1.0)))
    assert (len(one.recalled), one.wrong, one.missed) == (2, (), ())


def test_the_timing_of_a_cause_is_judged(slow_job):
    for when, since, period, mistimed in (
        (When(), None, None, False),
        (When(), 101, None, True),
        (When(since=2), 102, None, False),
        (When(since=2), None, None, True),
        (When(every=2), None, 2, False),
        (When(every=2), None, None, True),
    ):
        job = replace(slow_job, causes=(replace(slow_job.causes[0], when=when),))
        report_of_one = reported(("bad-worker", at((2, 0)), 0.01))
        report_of_one["causes"][0] |= {"since_step": since, "time": {"period": period}}
        named = judge(job, tuple(truths(job)), report_of_one).named
        assert [cause.mistimed for cause in named] == [mistimed], (when, since, period)


def test_a_fix_is_priced_against_the_job_that_ran_with_it():
    job = exact(shape=SHAPE, causes=(SkewedData(1, 2.0),))
    fixes = (("replace-workers", at((1, 0)), 0.05), ("balance-sequences", NOWHERE, 0.05), ("more-microbatches", {}, 1))
    one = judge(job, tuple(truths(job)), reported(fixes=fixes))
    replaced, balanced = one.fixes
    assert replaced.truth_s == pytest.approx(0.0)  # its data stays as long, on whatever machine
    assert balanced.truth_s > 0.02


def test_a_combination_is_priced_with_all_its_parts_made(slow_job):
    report_of_two = reported(fixes=(("replace-workers", at((2, 0)), 0.1), ("compress-dp-communication", NOWHERE, 0.1)))
    report_of_two["fixes"][1]["details"] = {"ratio": 2}
    sequence = [{"kind": fix["kind"], "title": fix["title"]} for fix in report_of_two["fixes"]]
    both = report_of_two["fixes"][0] | {"kind": "combination", "title": "both", "details": {"sequence": sequence}}
    report_of_two["fixes"].append(both)
    job = replace(slow_job, network=Network(nic=1e9, parameter_bytes=1e7))
    one = judge(job, tuple(truths(job)), report_of_two)
    replaced, compressed, together = one.fixes
    assert compressed.truth_s > 0.001
    assert together.truth_s == pytest.approx(replaced.truth_s + compressed.truth_s, abs=1e-4)


def test_a_wrong_price_of_a_right_cause_is_a_miss(slow_job):
    """The true price is a third of the step; named is none of it."""
    job = replace(slow_job, name="bad-worker-7")
    text = report([judge(job, tuple(truths(job)), reported(("bad-worker", at((2, 0)), 0.0)))])
    assert "bad-worker priced 0.0%, truth" in text


def test_misses_are_listed_with_the_command_that_shows_them():
    job = exact(shape=SHAPE, causes=(SlowWorkers(frozenset({(2, 0)}), 1.5),), name="bad-worker-7")
    text = report([judge(job, tuple(truths(job)), reported())])
    assert "missed bad-worker" in text
    assert "python -m benchmarks eventsim --case 'bad-worker' --seed 7 --count 1" in text


def test_what_is_accepted_or_blames_nobody_is_a_kind_of_tracekit():
    assert BLAMES_NOBODY.union(*ACCEPTED.values()) <= {detector.kind for detector in own_detectors()}
