"""A run of reinforcement-learning post-training, as its log or its recorder wrote it.

In: what importers read, or an op trace. Out: `PhaseLog`, seconds per step, or `RlTimeline`, phases and trajectories
with their times; and either as the op trace that a store keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from tracekit.base.errors import FormatError
from tracekit.base.text import quoted
from tracekit.trace.model import Format
from tracekit.trace.op import OpTrace

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


#: The phase in which a trainer waits for samples.
TRAINER_WAIT = "trainer-wait"
#: What logs say of a step apart from its phases: shares of the time in which a side idles; seconds that are due to
#: tools at most; seconds of tool calls of the mean trajectory.
TRAINER_IDLE, ROLLOUT_IDLE, TOOLS, TOOL_CALLS = "trainer idle", "rollout idle", "tools", "tool calls"


class StepTime(StrEnum):
    """The relation of a logged step to its phases."""

    SERIAL = "serial"  # contains them, one after the other
    SUMMED = "summed"  # is their sum: no clock measured the step
    OVERLAPPED = "overlapped"  # generation runs beside the other phases


class PhaseLog(Struct, frozen=True, eq=False):
    """What a framework logged: `step_s`, [steps], and the seconds of each phase, [steps].

    `steps`: their numbers, ascending. `left_out`: those of steps without a record, or without the time of the step, or
    of the generation if others have it. `contradiction`: why the times cannot be seconds; None if nothing in the log
    contradicts them. `restarts`: steps that a later attempt logged again, in the order of the attempts; from each on,
    that one counts. `stale`: the job generates samples while it trains on older ones. `measures`: what else the log
    says of each step, [steps], nan where it does not.
    """

    format: Format
    step_time: StepTime
    steps: _Ints
    step_s: _Floats
    phases: Mapping[str, _Floats]
    left_out: tuple[int, ...] = ()
    contradiction: str | None = None
    restarts: tuple[int, ...] = ()
    stale: bool = False
    measures: Mapping[str, _Floats] = {}


class Phases(Struct, frozen=True, eq=False):
    """Recorded phases; all arrays are [phases]. `start`, `end`: seconds of one clock."""

    name: npt.NDArray[np.str_]
    step: _Ints
    start: _Floats
    end: _Floats


class Trajectories(Struct, frozen=True, eq=False):
    """Recorded requests, in order of step and submission; a resumed one is a request for each part.

    All arrays are [requests]. `engine`: an index into `engines`; `submit`, `start`, `end`: seconds of the clock of the
    phases; `tokens`: decoded ones; `tool_s`: seconds between start and end in which nothing was decoded; `version`:
    number of the step whose weights decoded it, -1 if unknown.
    """

    engines: tuple[str, ...]
    step: _Ints
    engine: _Ints
    submit: _Floats
    start: _Floats
    end: _Floats
    tokens: _Floats
    tool_s: _Floats
    version: _Ints


class RlTimeline(Struct, frozen=True, eq=False):
    """Phases with their times, and the trajectories of their generations if they were recorded."""

    phases: Phases
    trajectories: Trajectories | None


#: The entry in the metadata of an op trace that is a run of post-training: what its ops do not say.
POST_TRAINING = "post_training"
#: Columns that only ops which are requests have.
_OF_REQUESTS = ("tokens", "tool_s", "version")


def trace_of(log: PhaseLog | RlTimeline, name: str) -> OpTrace:
    """The run as ops: phases on rank 0, each a stream of its own; the requests of an engine on the rank after."""
    ops, metadata = _logged(log) if isinstance(log, PhaseLog) else _timed(log)
    attempt = {"attempt": len(metadata["restarts"])} if "restarts" in metadata else {}
    return OpTrace(ops, name, rules=("streams",), metadata={POST_TRAINING: metadata} | attempt)


def part_of(trace: OpTrace, first: int, last: int) -> OpTrace:
    """The steps from `first` to `last` of an op trace of `trace_of`."""
    metadata, steps = trace.metadata[POST_TRAINING], trace.ops["step"].unique().sort()
    if "begun" in metadata:
        metadata = metadata | {"begun": pl.Series(metadata["begun"]).filter(steps.is_between(first, last)).to_list()}
    if "measures" in metadata:
        inside = steps.is_between(first, last)
        part = {name: pl.Series(values).filter(inside).to_list() for name, values in metadata["measures"].items()}
        metadata = metadata | {"measures": part}
    step_keys = metadata.keys() & {"left_out", "restarts"}
    metadata = metadata | {name: [step for step in metadata[name] if first <= step <= last] for name in step_keys}
    ops = trace.ops.filter(pl.col("step").is_between(first, last))
    return replace(trace, ops=ops, metadata={**trace.metadata, POST_TRAINING: metadata})


def run_of(trace: OpTrace) -> PhaseLog | RlTimeline:
    """The run in an op trace of `trace_of`. Raises FormatError for another one."""
    try:
        metadata = trace.metadata[POST_TRAINING]
        if metadata["format"] != Format.TRAJECTORIES:
            step, *logged = (ops for _, ops in trace.ops.group_by("stream", maintain_order=True))
            seconds = {str(ops["kind"][0]): ops["duration"].to_numpy() for ops in logged}
            return PhaseLog(
                Format(metadata["format"]), StepTime(metadata["step_time"]), trace.steps.astype(np.int64),
                step["duration"].to_numpy(), seconds, tuple(metadata.get("left_out", ())),
                metadata.get("contradiction"), tuple(metadata.get("restarts", ())), bool(metadata.get("stale")),
                {str(name): np.array(values, np.float64) for name, values in metadata.get("measures", {}).items()},
            )  # fmt: skip
        steps = trace.ops["step"].unique().sort()
        begun = pl.col("step").replace_strict(steps, metadata["begun"], return_dtype=pl.Float64)
        ops = trace.ops.with_columns(start=pl.col("start") + begun)
        ops = ops.with_columns(end=pl.col("start") + pl.col("duration"))
        requests, phases = ops.filter(pl.col("rank") > 0), ops.filter(pl.col("rank") == 0)
        engine, engines = requests["rank"].to_numpy() - 1, tuple(map(str, metadata["engines"]))
        np.take(engines, engine)  # or the error that one has no name
        times = (phases[column].to_numpy() for column in ("step", "start", "end"))
        recorded_phases = Phases(np.array(phases["kind"].to_list(), dtype=np.str_), *times)
        if requests.is_empty():
            return RlTimeline(recorded_phases, None)
        trajectories = Trajectories(
            engines=engines,
            engine=engine,
            submit=requests.select(pl.col("submit") + begun).to_series().to_numpy(),
            **{column: requests[column].to_numpy() for column in ("step", "start", "end", *_OF_REQUESTS)},
        )
        return RlTimeline(recorded_phases, trajectories)
    except (LookupError, TypeError, ValueError, AttributeError, pl.exceptions.PolarsError) as error:
        raise FormatError(
            f"{trace.name}: damaged ops of post-training ({quoted(error, 80)}); import the log again"
        ) from None


def _logged(log: PhaseLog) -> tuple[pl.DataFrame, dict[str, Any]]:
    """The step and its phases one after the other, since the log has no start times; generation overlaps if it did."""
    steps = len(log.step_s)
    starts_s, starts = np.zeros(steps), [np.zeros(steps)]
    for phase, took in log.phases.items():
        overlapped = log.step_time is StepTime.OVERLAPPED and phase == "generate"
        starts.append(np.zeros(steps) if overlapped else starts_s)
        starts_s = starts_s if overlapped else starts_s + took
    ops = pl.DataFrame(
        {
            "step": np.tile(log.steps, len(starts)),
            "rank": np.zeros(steps * len(starts), np.int64),
            "kind": np.repeat(["step", *log.phases], steps).tolist(),
            "stream": np.repeat(np.arange(len(starts)), steps),
            "start": np.concatenate(starts),
            "duration": np.concatenate((log.step_s, *log.phases.values())),
        }
    )
    metadata = {"format": str(log.format), "step_time": str(log.step_time)}
    measures = {
        name: [None if np.isnan(value) else value for value in values.tolist()] for name, values in log.measures.items()
    }
    more = {
        "left_out": list(log.left_out),
        "contradiction": log.contradiction,
        "restarts": list(log.restarts),
        "stale": log.stale,
        "measures": measures,
    }
    return ops, metadata | {name: value for name, value in more.items() if value}


def _timed(log: RlTimeline) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Phases and requests, from the beginning of their step, which the metadata has."""
    phases, requests = log.phases, log.trajectories
    times = {"step": phases.step, "kind": phases.name.tolist(), "start": phases.start, "end": phases.end}
    ops = pl.DataFrame(times, schema_overrides={"kind": pl.String}).with_columns(
        rank=pl.lit(0, pl.Int64), submit="start", stream=pl.col("kind").rank("dense").cast(pl.Int64)
    )
    if requests is not None:
        columns = {name: getattr(requests, name) for name in ("step", "start", "end", "submit", *_OF_REQUESTS)}
        served = pl.DataFrame(columns | {"rank": requests.engine + 1}).with_columns(
            kind=pl.lit("request"), stream=pl.int_range(pl.len(), dtype=pl.Int64).over("step", "rank")
        )
        ops = pl.concat([ops, served], how="diagonal")
    begun = ops.group_by("step").agg(pl.col("submit").min()).sort("step")
    step_begin = pl.col("step").replace_strict(begun["step"], begun["submit"], return_dtype=pl.Float64)
    ops = ops.select(
        pl.exclude("end", "start", "submit"),
        start=pl.col("start") - step_begin,
        duration=pl.col("end") - pl.col("start"),
        submit=pl.col("submit") - step_begin,
    )
    engines = [] if requests is None else list(requests.engines)
    return ops, {"format": str(Format.TRAJECTORIES), "engines": engines, "begun": begun["submit"].to_list()}
