"""No price exceeds what the size and the frequency in the cause's own words allow, for every kind of cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from judges.eventsim import Job as Drawn
from judges.eventsim import draw_job, simulate, truths
from judges.eventsim.truth import mean_step_s
from tests.analysis.causes.corpus import specs
from tests.analysis.causes.test_off_cpu import sleeps_and_stops
from tests.analysis.causes.test_rules_host import job as host_job
from tests.analysis.small_jobs import BACKWARD, FORWARD, of_steps
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.report.finding import Unit
from tracekit.synth import synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Worker

#: Words are rounded, and give the mean of the steps, ops and members that a cause is on.
ROUNDING = 1.05
#: Stops come by chance: the words say how many and how long.
BY_CHANCE = {"process-pauses"}
#: Any microbatch may be as much longer as it likes: its sequences are.
ANY_SIZE = {"sequence-length-imbalance"}
OF_THE_STEP = re.compile("over (the step|all steps)$")


def most_s(cause: Mapping[str, Any], report: Mapping[str, Any]) -> float:
    """Seconds of the mean step that the words of a cause allow: its size times how often and on how many it acts.

    Its size is a figure. A share with a name that ends in "over the step" is what one member loses of it, seconds are
    what one member loses; any other share or factor is how much longer ops take, so that the step loses at most that
    part of itself. Without such a figure, it costs nothing.
    """
    where, steps, figures = cause["where"], report["job"]["steps"], cause["evidence"]
    step_s = max(report["step_time_s"]["recorded"], report["step_time_s"]["original"])
    layout = report["job"]["layout"]
    members = len(where["workers"] or where["ranks"] or where["dp_ranks"]) or layout["dp"] * layout["pp"]
    if cause["kind"] in ANY_SIZE:
        return step_s
    if cause["kind"] in BY_CHANCE:
        return _stopped_s(cause["effect"], step_s, steps) * members
    named = {figure["name"]: figure["value"] for figure in figures}
    paused_s = named.get("paused forwards", 0.0) * named.get("longest pause", 0.0) / steps
    of_the_step = [value for name, value in named.items() if OF_THE_STEP.search(name)]
    if of_the_step or paused_s:
        return sum(of_the_step[:1]) * step_s * members + paused_s
    lost_s = [figure["value"] for figure in figures if figure["unit"] == Unit.SECONDS]
    if lost_s:
        return lost_s[0] * members
    longer = [figure for figure in figures if figure["unit"] in (Unit.SHARE, Unit.FACTOR)]
    if not longer:
        return 0.0
    if longer[0]["unit"] == Unit.FACTOR:
        return step_s * (1 - 1 / max(figure["value"] for figure in longer if figure["unit"] == Unit.FACTOR))
    # Of several workers, the figure is that of the least slow one.
    most = max((int(share) / 100 for share in re.findall(r"(\d+)%", cause["effect"].split(";")[0])), default=0.0)
    return step_s * (1 - 1 / (1 + max(longer[0]["value"], most)))


_SCALE = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _stopped_s(effect: str, step_s: float, steps: int) -> float:
    """Seconds of the mean step for which a worker is stopped, as the words say."""
    if found := re.search(r"stopped for ([\d.]+) (us|ms|s) in ([\d,]+) of ([\d,]+) steps", effect):
        size_s = float(found[1]) * _SCALE[found[2]]
        return size_s * int(found[3].replace(",", "")) / int(found[4].replace(",", ""))
    if found := re.search(r"for (\d+)% of its compute time", effect):
        return int(found[1]) / 100 * step_s
    found = re.search(r"([\d,]+) (?:computes|ops) pause by about ([\d.]+) (us|ms|s)", effect)
    assert found, effect
    return int(found[1].replace(",", "")) * float(found[2]) * _SCALE[found[3]] / steps


def drawn_together(case: str, beside: str, seed: int) -> Drawn:
    """A job of one case with the causes of another one as well."""
    job = draw_job(seed, case)
    return replace(job, causes=job.causes + draw_job(seed, beside).causes)


def drawn_jobs() -> Iterator[Trace]:
    """Jobs of both simulators, most with several causes, and long runs."""
    for case in (
        "two",
        "three",
        "four",
        "slow-host",
        "P1",
        "P16-optimizer",
        "P7",
        "P8-recorded",
        "P10",
        "P12",
        "P13",
        "P14",
        "P17-gc",
        "slow-rank",
    ):
        yield simulate(draw_job(11_000_000, case)).trace
    for case, beside, seed in (("P17-stops", "P16-launches", 1), ("P9", "P18", 2), ("P16-optimizer", "P16-data", 0)):
        job = drawn_together(case, beside, 11_000_000 + seed)
        yield simulate(replace(job, shape=replace(job.shape, steps=80))).trace
    yield from map(synthesize, islice(specs(11_000_000, 1, 0), 36, 72, 3))
    yield sleeps_and_stops(range(112, 400), (23, 91, 143, 178), steps=400)
    evaluates, works = [("evaluation", 0.5), FORWARD, BACKWARD], [FORWARD, BACKWARD]
    yield of_steps([[evaluates if step % 4 == 0 else works] * 3 for step in range(12)])
    yield host_job("host-delay", before_s=(0.3, 0.3))
    longer = host_job("host-delay", before_s=(0.001, 0.8))
    yield replace(longer, metadata={"hosts": {"0": "a", "1": "a"}, "run_queue_s": {"0": 0.0, "1": 0.7}})


@pytest.mark.parametrize(
    ("figures", "most"),
    [
        ([("longer than its peers, over the step", 0.1, "share"), ("longest wait", 9.0, "s")], 0.8),
        ([("optimizer over that of its peers", 9.0, "times"), ("beyond its peers", 0.3, "s")], 0.6),
        ([("long transfers", 7.0, ""), ("longest over the usual", 4.0, "times")], 3.0),
        ([("compute beyond that of its peers", 0.25, "share"), ("what noise alone does to it", 0.5, "share")], 0.8),
        ([("workers that were not recorded", 2.0, "")], 0.0),
    ],
)
def test_the_figures_of_a_cause_bound_its_price(figures: list[tuple[str, float, str]], most: float) -> None:
    """Of two workers, in a step of 4 s."""
    where = {"workers": [{}, {}], "ranks": [], "dp_ranks": []}
    evidence = [dict(zip(("name", "value", "unit"), figure, strict=True)) for figure in figures]
    cause = {"kind": "any", "where": where, "effect": "slower", "evidence": evidence}
    job = {"steps": 10, "layout": {"dp": 4, "pp": 2}}
    assert most_s(cause, {"job": job, "step_time_s": {"recorded": 4.0, "original": 3.9}}) == pytest.approx(most)


@pytest.mark.slow
def test_no_price_exceeds_what_size_and_frequency_allow():
    """In `causes` and in `fixes`; the fix of a cause saves at most what all causes of its kind cost."""
    for trace in drawn_jobs():
        report = PipelineJob(trace).whatif().to_dict()
        allowed: Counter[str] = Counter()
        for cause in report["causes"]:
            allowed[cause["kind"]] += ROUNDING * most_s(cause, report)
            assert cause["saved_s"] <= ROUNDING * most_s(cause, report), (trace.name, cause["effect"])
        for fix in report["fixes"]:
            if fix["cause"] is not None and fix["saved_s"] is not None:
                assert fix["saved_s"] <= allowed[fix["cause"]], (trace.name, fix["title"])


@pytest.mark.parametrize("seed", [3, 8, 24])
def test_stops_that_nothing_counted_take_no_host_code_with_them(seed):
    """Stops on a worker whose launches are late as well: each costs what the job gains without it."""
    job = drawn_together("P17-stops", "P18", 11_000_000 + seed)
    costs = {str(cause.kind): cause.saved_s for cause in PipelineJob(simulate(job).trace).whatif().findings}
    assert costs == pytest.approx({str(one.kind): one.saved_s for one in truths(job)}, abs=0.01 * mean_step_s(job))


def test_a_few_long_pauses_of_another_rank_take_neither_place_nor_time_from_the_usual_ones():
    """Rank 3 pauses for 20 ms in three of four steps; rank 2 for 70 ms in every 50th. None is on all ranks."""
    draw = np.random.default_rng(1)

    def program(step, rank):
        pause_s = 0.02 * (rank == 3 and step % 4 > 0) + 0.07 * (rank == 2 and step % 50 == 20)
        forwards = 0.02 * np.exp(draw.normal(0, 0.01, 4)) + pause_s * (np.arange(4) == 1)
        return [
            op for forward_s in forwards for op in (("forward-compute", float(forward_s)), ("backward-compute", 0.04))
        ]

    trace = of_steps([[program(step, rank) for rank in range(8)] for step in range(200)])
    (cause,) = [cause for cause in PipelineJob(trace).whatif().findings if cause.priced]
    assert cause.where.workers == (Worker(3, 0),)
    assert cause.when == "again and again"
    assert cause.saved_s == pytest.approx(0.75 * 0.02 + 0.02 * 0.07, rel=0.05)
