"""A microbatch that is longer at its place of each step on one rank alone: named there, once, at its price."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from judges.eventsim.causes import Cause, GcPauses, ProcessPauses, SlowFirstMicrobatch, SlowWorkers, StoppedProcess
from judges.eventsim.model import Shape
from judges.eventsim.uneven import UnequalSequences
from judges.eventsim.world import World
from tests.analysis.causes.simulated import FLAT, PIPELINE, costs, job, named, report
from tracekit.trace.model import Worker

KIND = "long-microbatch"
#: Stops so long and so frequent that they keep in step with the steps, whose length they set.
IN_STEP = Shape(dp=3, pp=4, microbatches=8, steps=23)


@dataclass(frozen=True, slots=True)
class LongOnOneRank(Cause):
    """One microbatch of each step takes `factor` times as long on one DP rank, on one of its stages or on all, and
    `added_s` longer; with `drawn`, at another place in each step.
    """

    dp: int = 1
    place: int = 1
    factor: float = 1.8
    kinds: tuple[str, ...] = ("forward", "backward")
    stage: int | None = None
    added_s: float = 0.0
    drawn: bool = False

    def apply(self, world: World) -> None:
        steps, *_, microbatches = world.forward.shape
        places = np.full(steps, self.place)
        if self.drawn:
            places = np.random.default_rng(5).integers(microbatches, size=steps)
        stages = slice(None) if self.stage is None else self.stage
        for kind in self.kinds:
            for step, place in enumerate(places):
                getattr(world, kind)[step, self.dp, stages, :, place] *= self.factor
                getattr(world, f"{kind}_s")[step, self.dp, stages, :, place] += self.added_s


@pytest.mark.parametrize(
    ("shape", "cause", "stages", "effect"),
    [
        (FLAT, LongOnOneRank(), (0,), "microbatch 1 of each step takes"),
        (Shape(dp=2, pp=1, microbatches=2), LongOnOneRank(place=0), (0,), "microbatch 0 of each step takes"),
        (Shape(dp=4, pp=4), LongOnOneRank(), (0, 1, 2, 3), "microbatch 1 of each step takes"),
        (PIPELINE, LongOnOneRank(place=7, stage=2), (2,), "microbatch 7 of each step takes"),
        (FLAT, LongOnOneRank(kinds=("forward",)), (0,), "the forward of microbatch 1 of each step takes"),
        (
            Shape(dp=4, pp=4),
            LongOnOneRank(kinds=("backward",)),
            (0, 1, 2, 3),
            "the backward of microbatch 1 of each step takes",
        ),
    ],
    ids=["one stage", "two ranks, two microbatches", "pipeline", "one worker", "forwards", "backwards"],
)
def test_it_is_the_only_finding_and_costs_what_the_job_gains_without_it(
    shape: Shape, cause: LongOnOneRank, stages: tuple[int, ...], effect: str
) -> None:
    slow = job(cause, shape=shape)
    (finding,) = named(slow)
    assert finding.kind == KIND
    assert finding.where.workers == tuple(Worker(1, stage) for stage in stages)
    assert finding.effect.startswith(effect)
    assert finding.evidence[0].value == pytest.approx(0.8, abs=0.03)
    assert finding.saved_s == pytest.approx(costs(slow, cause), rel=0.03)


def test_its_fix_saves_what_it_costs_and_the_sampler_comes_first_if_both_kinds_are_longer() -> None:
    of_data, of_code = (
        report(job(LongOnOneRank(), shape=FLAT)),
        report(job(LongOnOneRank(kinds=("forward",)), shape=FLAT)),
    )
    assert of_data.verdict.label == "uneven work"
    assert of_data.verdict.lost_s == pytest.approx(of_data.fixes[0].saved_s, rel=0.01)
    assert "sampler" in of_data.answer.action
    assert "profile" in of_code.answer.action.lower()


def test_two_ranks_with_it_are_two_causes_that_hide_each_other() -> None:
    both = job(LongOnOneRank(), LongOnOneRank(dp=3, place=5), shape=FLAT)
    findings = named(both)
    assert {(finding.kind, finding.where.workers) for finding in findings} == {
        (KIND, (Worker(1, 0),)),
        (KIND, (Worker(3, 0),)),
    }
    assert all(finding.alone_s > 10 * finding.saved_s for finding in findings)


@pytest.mark.parametrize(
    ("shape", "cause", "kinds"),
    [
        (FLAT, SlowFirstMicrobatch(), {"position-effect"}),
        (FLAT, SlowWorkers(frozenset({(1, 0)})), {"bad-worker"}),
        (FLAT, ProcessPauses(seed=3, rate=0.05), {"process-pauses"}),
        (FLAT, GcPauses(seed=3, recorded=False), {"python-gc"}),
        (IN_STEP, StoppedProcess((0, 3), period_s=0.1228, length_s=0.041), {"process-pauses"}),
        (Shape(dp=8, pp=4, microbatches=4), StoppedProcess((1, 2), period_s=0.091, length_s=0.027), {"process-pauses"}),
        (FLAT, UnequalSequences(seed=3), {"sequence-length-imbalance"}),
    ],
    ids=[
        "all ranks",
        "all places",
        "pauses",
        "collections",
        "in step",
        "in step, one kind",
        "lengths",
    ],
)
def test_what_looks_like_it_has_another_name(shape: Shape, cause: Cause, kinds: set[str]) -> None:
    assert {finding.kind for finding in named(job(cause, shape=shape))} == kinds


def test_at_another_place_each_time_it_is_uneven_sequences_and_no_stopped_process() -> None:
    findings = named(job(LongOnOneRank(drawn=True), shape=FLAT))
    assert {finding.kind for finding in findings} == {"sequence-length-imbalance"}


def test_long_forwards_at_one_place_of_all_ranks_are_that_and_no_garbage_collection() -> None:
    forwards = [LongOnOneRank(dp=dp, kinds=("forward",)) for dp in range(FLAT.dp)]
    assert {finding.kind for finding in named(job(*forwards, shape=FLAT))} == {"position-effect"}


def test_as_many_seconds_in_forwards_as_in_backwards_are_no_work() -> None:
    kinds = {finding.kind for finding in named(job(LongOnOneRank(factor=1.0, added_s=0.04), shape=FLAT))}
    assert kinds
    assert KIND not in kinds


def test_a_healthy_job_has_none() -> None:
    assert named(job(shape=FLAT)) == []


def test_three_steps_do_not_show_that_it_returns() -> None:
    findings = named(job(LongOnOneRank(), shape=Shape(dp=4, pp=1, steps=3)))
    assert KIND not in {finding.kind for finding in findings}
