"""Workers that begin a step before others have ended the one before, against jobs played step after step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.handmade import frame
from tests.properties import examples
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.graph.op_grid import op_grid
from tracekit.analysis.replay.engine import JobReplay
from tracekit.analysis.whatif.interventions import (
    IDEAL,
    ORIGINAL,
    RECORDED,
    Intervention,
    ScaleDelays,
    SetCost,
    addition,
    mean_step_time,
    step_times,
)
from tracekit.analysis.whatif.selection_text import parse_selection
from tracekit.trace.canonical import Trace
from tracekit.trace.model import Layout, OpKind

#: Steps played before those that are recorded, until each is like the one before.
RUN_IN, STEPS = 20, 12
TRANSFER_S = 0.25


@dataclass(frozen=True)
class Pipeline:
    """Two stages, one microbatch; seconds of data loading, forward, backward and optimizer by stage."""

    data: tuple[float, float] = (0.1, 0.1)
    forward: tuple[float, float] = (1.0, 1.0)
    backward: tuple[float, float] = (2.0, 2.0)
    optimizer: tuple[float, float] = (0.25, 0.25)

    def played(self) -> tuple[Trace, float]:
        """A recording, and how long a step takes."""
        free, lanes, begun = [0.0, 0.0], [], []
        for _ in range(RUN_IN + STEPS):
            zero = max(free)
            fetched = [free[at] + self.data[at] for at in range(2)]
            sent = fetched[0] + self.forward[0]
            there = max(sent, free[1]) + TRANSFER_S
            first = max(there, fetched[1])
            turned = first + self.forward[1]
            done = turned + self.backward[1]
            back = done + TRANSFER_S
            last = back + self.backward[0]
            end = (last + self.optimizer[0], done + self.optimizer[1])
            ops = (
                (0, "data-load", 0, None, free[0], fetched[0]),
                (0, "forward-compute", 0, 0, fetched[0], sent),
                (0, "forward-send", 0, 0, sent, there),
                (0, "backward-recv", 0, 0, sent, back),
                (0, "backward-compute", 0, 0, back, last),
                (0, "optimizer", 0, None, last, end[0]),
                (1, "data-load", 0, None, free[1], fetched[1]),
                (1, "forward-recv", 0, 0, free[1], there),
                (1, "forward-compute", 0, 0, first, turned),
                (1, "backward-compute", 0, 0, turned, done),
                (1, "backward-send", 0, 0, done, back),
                (1, "optimizer", 0, None, done, end[1]),
            )
            lanes.append([(*op[:4], op[4] - zero, op[5] - zero) for op in ops])
            begun.append(zero)
            free = list(end)
        step_s = begun[-1] - begun[-2]
        ops = frame({0: lanes[-1]}, range(STEPS))
        return Trace.from_frame(ops, Layout(dp=1, pp=2, world_size=2), name="by hand"), step_s

    def replayed(self) -> JobReplay:
        return JobReplay.from_trace(self.played()[0])

    def step_s(self) -> float:
        return self.played()[1]


@dataclass(frozen=True)
class DataParallel:
    """Ranks that all-reduce their gradients. `work`: seconds of forward and backward together, by rank; `pause_s`: how
    long the host of each waits to launch its optimizer.
    """

    work: tuple[float, ...]
    optimizer: tuple[float, ...]
    pause_s: float = 0.0

    def played(self) -> tuple[Trace, float]:
        """A recording, and how long a step takes."""
        ranks = range(len(self.work))
        free, zero = [0.0 for _ in ranks], 0.0
        lanes, begun = {}, []
        for _ in range(RUN_IN + STEPS):
            zero = max(free)
            done = [free[at] + self.work[at] for at in ranks]
            met = max(done) + TRANSFER_S
            launched = met + self.pause_s
            end = [launched + self.optimizer[at] for at in ranks]
            lanes = {
                at: [
                    (0, "forward-compute", 0, 0, free[at] - zero, done[at] - zero),
                    (0, "grads-reduce-scatter", 0, None, done[at] - zero, met - zero),
                    (0, "optimizer", 0, None, launched - zero, end[at] - zero),
                ]
                for at in ranks
            }
            begun.append(zero)
            free = end
        ops = frame(lanes, range(STEPS))
        layout = Layout(dp=len(self.work), pp=1, world_size=len(self.work))
        return Trace.from_frame(ops, layout, name="by hand"), begun[-1] - begun[-2]

    def replayed(self) -> JobReplay:
        return JobReplay.from_trace(self.played()[0])

    def step_s(self) -> float:
        return self.played()[1]


def with_set(text: str, seconds: float) -> tuple[Intervention, ...]:
    return (*ORIGINAL, SetCost(parse_selection(text), seconds))


def test_work_that_a_stage_does_while_the_other_ends_its_step_costs_nothing():
    """Stage 1 ends 2.25 s before stage 0, and fetches for 3 s; its first microbatch is there 1.35 s into the step."""
    slow = Pipeline(data=(0.1, 3.0))
    assert slow.step_s() == pytest.approx(6.85)
    replay = slow.replayed()
    assert mean_step_time(replay, ORIGINAL) == pytest.approx(6.85)
    assert mean_step_time(replay, RECORDED) == pytest.approx(6.85)
    assert attribute(replay).discrepancy == pytest.approx(0.0, abs=1e-9)


def test_a_stage_begins_as_early_as_it_ends_in_the_scenario():
    """Stage 1 updates for 5 s: a step takes 8.25 s, and stage 0 begins 2.5 s before it. With 0.25 s, it does not."""
    slow = Pipeline(optimizer=(0.25, 5.0))
    assert slow.step_s() == pytest.approx(8.25)
    replay = slow.replayed()
    assert mean_step_time(replay, ORIGINAL) == pytest.approx(8.25)
    assert mean_step_time(replay, with_set("kind=optimizer", 0.25)) == pytest.approx(6.85)


seconds = st.floats(0.05, 6.0)
both = st.tuples(seconds, seconds)


@examples(20)
@given(data=both, forward=both, backward=both, optimizer=both, part=st.sampled_from(["data-load", "optimizer"]))
def test_scenarios_take_as_long_as_the_pipeline_played_with_their_durations(data, forward, backward, optimizer, part):
    job = Pipeline(data, forward, backward, optimizer)
    replay = job.replayed()
    for scenario in (ORIGINAL, RECORDED):
        assert mean_step_time(replay, scenario) == pytest.approx(job.step_s(), rel=1e-3)
    name = "data" if part == "data-load" else part
    changed = replace(job, **{name: (0.01, 0.01)})
    assert mean_step_time(replay, with_set(f"kind={part}", 0.01)) == pytest.approx(changed.step_s(), rel=1e-3)


def test_what_one_worker_costs_alone_begins_as_the_ideal_does():
    replay = Pipeline(data=(0.1, 3.0)).replayed()
    found = attribute(replay)
    alone = addition(parse_selection("dp_rank=0"))
    assert found.by_dp_rank[:, 0] == pytest.approx(step_times(replay, alone))
    assert float(np.mean(found.ideal)) == pytest.approx(mean_step_time(replay, IDEAL))


def test_a_rank_computes_while_another_still_updates():
    """Rank 1 updates for 2 s while rank 0 begins its next 4 s of work: a step takes 5.25 s, not 6.25 s."""
    slow = DataParallel(work=(4.0, 3.0), optimizer=(0.0, 2.0))
    assert slow.step_s() == pytest.approx(5.25)
    replay = slow.replayed()
    assert mean_step_time(replay, ORIGINAL) == pytest.approx(5.25)
    assert mean_step_time(replay, RECORDED) == pytest.approx(5.25)
    assert attribute(replay).discrepancy == pytest.approx(0.0, abs=1e-9)
    assert mean_step_time(replay, with_set("kind=optimizer and dp_rank=1", 0.5)) == pytest.approx(4.25)


@pytest.mark.parametrize("looked_at", [4, STEPS])
def test_shorter_launch_delays_shorten_the_step_however_many_steps_are_looked_at(monkeypatch, looked_at):
    """Beginnings are found from some of the steps: half of a pause of 0.5 s is gone in all of them."""
    monkeypatch.setattr("tracekit.analysis.replay.engine.MOST_STEPS", looked_at)
    slow = DataParallel(work=(4.0, 3.0), optimizer=(0.0, 2.0), pause_s=0.5)
    assert slow.step_s() == pytest.approx(5.75)
    replay = slow.replayed()
    optimizers = op_grid(replay.graph, (OpKind.OPTIMIZER,))
    assert step_times(replay, ()) == pytest.approx(np.full(STEPS, 5.75))
    assert step_times(replay, (ScaleDelays(optimizers, np.float64(0.5)),)) == pytest.approx(np.full(STEPS, 5.5))


@pytest.mark.slow
@examples(20)
@given(
    ranks=st.lists(st.tuples(seconds, seconds), min_size=2, max_size=4),
    chosen=st.integers(0, 3),
    part=st.sampled_from(["forward-compute", "optimizer"]),
)
def test_scenarios_take_as_long_as_the_ranks_played_with_their_durations(ranks, chosen, part):
    work, optimizer = zip(*ranks, strict=True)
    job = DataParallel(work, optimizer)
    replay, chosen = job.replayed(), chosen % len(ranks)
    assert mean_step_time(replay, ORIGINAL) == pytest.approx(job.step_s(), rel=1e-2)
    changed = list(work if part == "forward-compute" else optimizer)
    changed[chosen] = 0.01
    of = "work" if part == "forward-compute" else "optimizer"
    expected = replace(job, **{of: tuple(changed)}).step_s()
    assert mean_step_time(replay, with_set(f"kind={part} and dp_rank={chosen}", 0.01)) == pytest.approx(
        expected, rel=1e-2
    )


def test_some_steps_of_a_job_keep_the_beginnings_of_their_own_ranks():
    """A DP rank that most steps lack: those steps alone still begin as in the whole job."""
    trace = DataParallel(work=(3.0, 3.0, 2.0), optimizer=(0.1, 1.0, 0.1)).played()[0]
    ops = trace.ops.filter((pl.col("dp_rank") != 0) | (pl.col("step") < 2))
    replay = JobReplay.from_trace(Trace.from_frame(ops, trace.layout, name="by hand"))
    assert replay.graph.rank_begin_s is not None
    assert len(replay.graph.dp_ranks) == 3
    number = int(replay.graph.steps[5])
    some = replay.only_steps([number])
    assert some.graph.dp_ranks == (1, 2)
    assert step_times(some, RECORDED)[0] == step_times(replay, RECORDED)[5]
