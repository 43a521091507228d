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
from tracekit.analysis.detectors.detector import own_detectors
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.synth import synthesize
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Worker

#: Words are rounded, and give the mean of the steps, ops and members that a cause is on.
ROUNDING = 1.05
#: Nothing can be repaired.
UNPRICED = {"clock-error", "too-little-trace", "unexplained", "healthy"}
#: By which share ops are longer, or how many times as long: the step loses at most that part of itself.
LONGER = {
    "bad-worker": "compute beyond that of its peers",
    "slow-host": "compute beyond that of its peers",
    "slow-rank-group": "compute beyond that of its peers",
    "slow-rank-of-worker": "computing beyond its peers",
    "data-skew": "compute beyond that of other DP ranks, on all stages",
    "stage-imbalance": "compute beyond that of the usual stage",
    "position-effect": "compute beyond that of other places",
    "slow-steps": "compute beyond that of the usual step",
    "slow-p2p-link": "transfer time over the usual",
    "slow-nic": "transfer time over",
    "congestion": "longest over the usual",
}
#: The share of the step that one member loses.
OF_THE_STEP = {
    "host-bound-launch": "launch delays and host work, over the step",
    "slow-host-code": "longer than its peers, over the step",
    "random-variation": "cost of the spread, over the step",
    "shared-network-card": "what goes without, over the step",
    "lockstep-jitter": "waiting in turn, over the step",
    "checkpoint-stalls": "over all steps",
    "evaluation": "over all steps",
    "python-gc": "over the step",
}
#: The seconds of the step that one member loses.
SECONDS = {
    "late-data-loading": "",
    "slow-optimizer": "beyond its peers",
    "unrecorded-worker-late": "its peers wait",
    "busy-cores": "longest wait",
}
BY_CHANCE = {"process-pauses"}
#: Any microbatch may be as much longer as it likes: its sequences are.
ANY_SIZE = {"sequence-length-imbalance"}


def most_s(cause: Mapping[str, Any], report: Mapping[str, Any]) -> float:
    """Seconds of the mean step that the words of a cause allow: its size times how often and on how many it acts."""
    kind, where, steps = cause["kind"], cause["where"], report["job"]["steps"]
    step_s = max(report["step_time_s"]["recorded"], report["step_time_s"]["original"])
    layout = report["job"]["layout"]
    members = len(where["workers"] or where["ranks"] or where["dp_ranks"]) or layout["dp"] * layout["pp"]
    figures = {one["name"]: one["value"] for one in cause["evidence"]}

    def figure(part: str) -> float:
        return next((value for name, value in figures.items() if part in name), 0.0)

    if kind in LONGER:
        # Of several workers, the figure is that of the least slow one.
        most = max((int(share) / 100 for share in re.findall(r"(\d+)%", cause["effect"].split(";")[0])), default=0.0)
        times = max(figure(LONGER[kind]), figure("collectives over"), most) + (kind not in TIMES)
        return step_s * (1 - 1 / times)
    if kind in OF_THE_STEP:
        paused_s = figure("paused forwards") * figure("longest pause") / steps
        return figure(OF_THE_STEP[kind]) * step_s * members + paused_s
    if kind in SECONDS:
        return figure(SECONDS[kind]) * members
    if kind in ANY_SIZE:
        return step_s
    assert kind in BY_CHANCE
    return _stopped_s(cause["effect"], step_s, steps) * members


#: Kinds whose figure is a factor, not a share more.
TIMES = {"slow-p2p-link", "slow-nic", "congestion"}
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


def test_every_kind_of_cause_has_a_size():
    kinds = [*LONGER, *OF_THE_STEP, *SECONDS, *BY_CHANCE, *ANY_SIZE, *UNPRICED]
    of_recordings = {
        "sync-calls", "late-start", "late-rank", "exposed-communication", "warm-up", "gpu-allocation", "python-code",
        "host-operator", "slow-copies", "slow-kernels", "recompute", "stream-waits", "idle-unseen", "hot-expert",
        "hot-rank", "rotating", "skew", "unknown-loads", "one-launch-queue",
    }  # fmt: skip
    of_post_training = {"queueing", "tail", "engines", "tools", "reward", "sync"}
    assert sorted([*kinds, *of_recordings, *of_post_training]) == sorted(detector.kind for detector in own_detectors())


@pytest.mark.slow
def test_no_price_exceeds_what_size_and_frequency_allow():
    """In `causes` and in `fixes`; the fix of a cause saves at most what all causes of its kind cost."""
    for trace in drawn_jobs():
        report = PipelineJob(trace).whatif().to_dict()
        allowed: Counter[str] = Counter()
        for cause in report["causes"]:
            if cause["kind"] not in UNPRICED:
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
