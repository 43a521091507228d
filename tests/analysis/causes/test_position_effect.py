"""A microbatch that is slow at its place of the step, on all ranks: found, at its price; what looks like it is not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from judges.eventsim.causes import Cause, SlowFirstMicrobatch, SlowSteps, SlowWorkers, When
from judges.eventsim.model import Shape
from judges.eventsim.world import World
from tests.analysis.causes.simulated import FLAT, PIPELINE, costs, job, named
from tracekit.report.finding import Place


@dataclass(frozen=True, slots=True)
class LongAtRandom(Cause):
    """In each step, one microbatch of each DP rank takes 1.6 times as long, another one each time."""

    def apply(self, world: World) -> None:
        steps, dp, _, _, microbatches = world.forward.shape
        drawn = np.random.default_rng(3).integers(microbatches, size=(steps, dp))
        for step, rank in np.ndindex(steps, dp):
            for computes in (world.forward, world.backward):
                computes[step, rank, :, :, drawn[step, rank]] *= 1.6


@pytest.mark.parametrize("shape", [PIPELINE, FLAT], ids=["pipeline", "one stage"])
def test_it_is_the_only_finding_and_costs_what_the_job_gains_without_it(shape: Shape) -> None:
    cause = SlowFirstMicrobatch(factor=2.0)
    slow = job(cause, shape=shape)
    (finding,) = named(slow)
    assert (finding.kind, finding.where) == ("position-effect", Place())
    assert [figure.value for figure in finding.evidence] == pytest.approx(
        [1.0, 0.0], abs=0.02
    )  # twice as long, the first
    assert finding.saved_s == pytest.approx(costs(slow, cause), rel=0.02)


@pytest.mark.parametrize(
    "cause",
    [LongAtRandom(), SlowWorkers(frozenset({(1, 2)})), SlowSteps(when=When(every=4))],
    ids=["another microbatch each step", "one worker", "some steps"],
)
def test_what_looks_like_it_has_another_name(cause: Cause) -> None:
    kinds = {finding.kind for finding in named(job(cause))}
    assert kinds
    assert "position-effect" not in kinds


def test_a_healthy_job_has_none() -> None:
    assert named(job()) == []
