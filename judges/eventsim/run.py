"""Run a job, step after step, and record the trace of its ranks.

Recorded times are on the clock of each rank and rounded to microseconds; the true length of each step is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import polars as pl

from judges.eventsim.causes import checkpoints_gathered, needs_checkpoint, needs_gc
from judges.eventsim.engine import Episode, StepInput, StepTimes, run_step
from judges.eventsim.graph import OPTIONAL, Source, StepGraph, build
from judges.eventsim.model import EPOCH_S, FIRST_STEP, LAYERS_PER_STAGE, Job
from judges.eventsim.network import SharedNetwork
from judges.eventsim.world import Floats, World, draw_world, seconds, waited_share
from tracekit import Layout, Trace


@dataclass(frozen=True)
class SimulatedJob:
    """A job that ran. `step_s`: true length of each step, seconds, [steps]."""

    trace: Trace
    step_s: Floats


class RanStep(NamedTuple):
    """A step: its number, its start (seconds from the start of the run), and the times of its nodes."""

    step: int
    began: float
    times: StepTimes


@dataclass(frozen=True)
class Run:
    """A job's steps as they happened."""

    world: World
    graph: StepGraph
    steps: tuple[RanStep, ...]
    step_s: Floats


def simulate(job: Job) -> SimulatedJob:
    """Run a job and record it."""
    ran = run(job)
    return SimulatedJob(_trace(job, ran), ran.step_s)


@lru_cache(maxsize=4)
def run(job: Job) -> Run:
    """Run a job, step after step; a rank begins a step when it has ended the one before."""
    slots = needs_checkpoint(job)
    graph = build(job, gc_slots=needs_gc(job), checkpoint_slots=slots, checkpoints_gathered=checkpoints_gathered(job))
    world = draw_world(job, len(graph.flows))
    tables = seconds(world)
    begin = np.zeros(len(job.shape.cells))
    steps, began = [], [0.0]
    kinds = np.array([flow.collective for flow in sorted(graph.flows.values(), key=lambda flow: flow.number)], bool)
    for step in range(job.shape.steps):
        work = np.zeros(len(graph.source))
        for source, nodes in graph.nodes_of.items():
            work[nodes] = tables[source][step][graph.index_of[source]]
        stretch = np.where(kinds, world.collectives[step], world.p2p[step])
        episodes = [
            Episode(began[-1] + after, began[-1] + after + length, factor)
            for after, length, factor in world.episodes[step]
        ]
        given = StepInput(begin.tolist(), work.tolist(), stretch.tolist(), world.stops, episodes)
        network = SharedNetwork(world.bandwidth[step].tolist(), job.network.queueing, world.topology.uplink)
        times = run_step(graph, given, network)
        steps.append(RanStep(FIRST_STEP + step, began[-1], times))
        ended = np.array([times.end[graph.last[cell]] for cell in job.shape.cells])
        begin = ended + job.host.between_steps_s + world.pause_s[step]
        began.append(float(begin.min()))
    return Run(world, graph, tuple(steps), np.diff(began))


def _trace(job: Job, ran: Run) -> Trace:
    shape = job.shape
    shares = waited_share(ran.world)
    shares_of_steps = [{kind: share[at] for kind, share in shares.items()} for at in range(shape.steps)]
    frame = pl.concat(_recorded(job, ran, step, share) for step, share in zip(ran.steps, shares_of_steps, strict=True))
    frame = frame.with_columns(seq=pl.int_range(pl.len()).over("step", "rank", "kind"))
    layout = Layout(dp=shape.dp, pp=shape.pp, tp=shape.tp, vpp=shape.vpp)
    recorded = [cell for cell in shape.cells if cell not in job.recording.unrecorded]
    metadata: dict[str, object] = {
        "framework": "eventsim",
        "hosts": {
            str(shape.rank(*cell) + at): f"host-{shape.host(*cell):04d}"
            for cell in recorded
            for at in range(shape.tp if shares else 1)
        },
    }
    if shares:
        metadata["ranks_of_workers"] = {
            str(first): list(range(first, first + shape.tp)) for first in (shape.rank(*cell) for cell in recorded)
        }
    if job.recording.layers:
        metadata["layers"] = [round(LAYERS_PER_STAGE * share) for share in ran.world.layers.sum(axis=1)]
    starts = {step.step: EPOCH_S + round(step.began, 6) for step in ran.steps}
    return Trace.from_frame(frame, layout, name=job.name, step_starts=starts, metadata=metadata)


def _recorded(job: Job, ran: Run, step: RanStep, shares: Mapping[Source, Floats]) -> pl.DataFrame:
    """The ops of one step as their ranks recorded them. `shares`: of computes, for which the ranks of a worker wait."""
    ops = ran.graph.ops
    begin = np.array(step.times.start)[[op.begin for op in ops]]
    end = np.array(step.times.end)[[op.end for op in ops]]
    shape = job.shape
    offset = np.array([ran.world.offset_s[op.cell] for op in ops])
    drift = np.array([ran.world.drift[op.cell] for op in ops])
    is_recorded = np.array([op.cell not in job.recording.unrecorded for op in ops])
    is_recorded &= (end > begin) | np.array([op.source not in OPTIONAL for op in ops])
    is_recorded &= np.array([op.source not in ran.world.hidden for op in ops])
    start = np.round(begin + drift * begin + offset - step.began, 6)
    stop = np.round(end + drift * end + offset - step.began, 6)
    duration = np.round(np.maximum(stop - start, 0.0), 6)
    index = ran.graph.index
    frame = pl.DataFrame(
        {
            "step": np.full(len(ops), step.step),
            "rank": [shape.rank(*op.cell) for op in ops],
            "dp_rank": [op.cell[0] for op in ops],
            "pp_rank": [op.cell[1] for op in ops],
            "kind": [op.kind for op in ops],
            "microbatch": pl.Series([op.microbatch for op in ops], dtype=pl.Int32),
            "chunk": pl.Series([op.chunk for op in ops], dtype=pl.Int32),
            "start": start,
            "duration": duration,
        }
    )
    if shares:
        waited = [
            np.round(shares[op.source][index[op.begin]] * length, 6).tolist() if op.source in shares else None
            for op, length in zip(ops, duration.tolist(), strict=True)
        ]
        frame = frame.with_columns(waited=pl.Series(waited, dtype=pl.List(pl.Float64)))
    return frame.filter(is_recorded)
