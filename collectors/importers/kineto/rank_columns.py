"""What one rank of a file did: its GPU ops, the calls behind them, and what its host threads were doing meanwhile.

In: `FileColumns`. Out: `RankColumns`, one per rank in the file. This runs in the process that read the file: operators,
of which there are many, are reduced here to what they say about calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.collectors.importers.kineto.event_columns import (
    COLLECTIVE_OPERATOR,
    NO_ID,
    RECORD_EVENT,
    ROLES,
    CollectiveArgs,
    FileColumns,
)
from tracekit.gpu_recording import Activity

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_STEP = re.compile(r"ProfilerStep#(\d+)")
#: Names of operators and annotations that say what phase of a step their calls belong to, the first match counts.
_PHASES = (
    ("optimizer", re.compile(r"^Optimizer\.(step|zero_grad)#|^optimizer", re.IGNORECASE)),
    ("backward", re.compile(r"^autograd::engine::evaluate_function|^#*\s*backward|^PP:\d+[BW]", re.IGNORECASE)),
)
#: Names of annotations during which a host thread is kept from calling.
_PAUSES = (
    ("input", re.compile(r"^enumerate\(DataLoader\)|DataLoader\w*\.__next__|^#*\s*data[ _-]?load", re.IGNORECASE)),
    ("gc", re.compile(r"^(Python )?GC\b|^gc\.collect|garbage collect", re.IGNORECASE)),
)
DEFAULT_PHASE = "forward"
_NCCL_ANNOTATION = re.compile(r"^(?:nccl|rccl):(\w+)")


@dataclass(frozen=True, slots=True)
class RankColumns:
    """One rank of one file, which is `part` where several are `fused`. Times: microseconds from `base_us`.

    `gpu`: start, duration, name, activity, device, stream, shape, launch (row of `calls`, -1 for none), step (-1 for
    none), collective (position in `collectives`, -1 for none), stated. `calls`: start, duration, thread, name, role,
    busy_since, operator, phase, collective_call, step, waits_stream, waits_for_stream, recorded_at. `step_spans`:
    start, duration, step. `pauses`: thread, start, duration, kind.
    """

    file: str
    part: int
    fused: bool
    base_us: int
    header: Mapping[str, Any]
    gpu: pl.DataFrame
    calls: pl.DataFrame
    step_spans: pl.DataFrame
    pauses: pl.DataFrame
    collectives: tuple[CollectiveArgs, ...]
    ranks_in_groups: tuple[CollectiveArgs, ...]
    host_events: int
    notes: tuple[str, ...]


def ranks_of(
    columns: FileColumns, file: str, header: Mapping[str, Any], notes: tuple[str, ...]
) -> Iterator[RankColumns]:
    """Each rank that the file holds; one without events where it holds none."""
    frames = (columns.gpu, columns.calls, columns.operators, columns.annotations, columns.syncs)
    parts = sorted({part for frame in frames for part in frame["part"].unique().to_list()}) or [0]
    for part in parts:
        yield _rank(columns, part, file, header, notes, fused=parts != [0])


def _rank(
    columns: FileColumns, part: int, file: str, header: Mapping[str, Any], notes: tuple[str, ...], *, fused: bool
) -> RankColumns:
    def of(frame: pl.DataFrame) -> pl.DataFrame:
        mine = frame.filter(pl.col("part") == part) if fused else frame
        return mine.drop("part") if mine["ts"].is_sorted() else mine.drop("part").sort("ts", maintain_order=True)

    names = np.array([*columns.strings, ""], dtype=object)
    texts = pl.Series(columns.strings, dtype=pl.String)
    gpu, operators, annotations = of(columns.gpu), of(columns.operators), of(columns.annotations)
    calls = _kept_calls(of(columns.calls), gpu)
    steps = _steps(annotations, names)
    started = calls["ts"].to_numpy()
    threads = _Threads(calls, operators, annotations, names)
    collective_calls = operators.filter(_names(names, COLLECTIVE_OPERATOR))
    inside = threads.containing(collective_calls)
    calls_frame = pl.DataFrame(
        {
            "start": started,
            "duration": calls["dur"],
            "thread": calls["thread"],
            "name": texts[calls["name"]],
            "role": calls["role"],
            "busy_since": threads.busy_since(),
            "operator": pl.Series(threads.operators(), dtype=pl.String),
            "phase": pl.Series(threads.phases(), dtype=pl.String),
            "collective_call": inside >= 0,
            "step": _step_at(steps, started),
            **_recorded_waits(of(columns.syncs), calls, of(columns.calls)),
        }
    )
    launch = _launches(gpu, calls)
    launched = np.append(inside, -1)[launch]
    stated = np.append(collective_calls["collective"].to_numpy(), NO_ID)[launched]
    own = gpu["collective"].to_numpy()
    collective, all_args = _named(
        np.where(own >= 0, own, stated), threads.collective_names(), launch, columns.collectives
    )
    gpu_frame = pl.DataFrame(
        {
            "start": gpu["ts"],
            "duration": gpu["dur"],
            "name": texts[gpu["name"]],
            "activity": pl.Series([str(kind) for kind in Activity], dtype=pl.String)[gpu["activity"]],
            "device": gpu["device"],
            "stream": gpu["stream"],
            "shape": texts[gpu["shape"]],
            "launch": launch,
            "step": np.append(calls_frame["step"].to_numpy(), -1)[launch],
            "collective": collective,
            "stated": own >= 0,
        }
    )
    used = set(collective_calls["collective"].to_list()) | set(own.tolist())
    return RankColumns(
        file=file,
        part=part,
        fused=fused,
        base_us=columns.base_us,
        header=header,
        gpu=gpu_frame,
        calls=calls_frame,
        step_spans=steps,
        pauses=_pauses(annotations, names),
        collectives=all_args,
        ranks_in_groups=tuple(columns.collectives[one] for one in sorted(used) if one >= 0),
        host_events=operators.height + annotations.height,
        notes=notes,
    )


def _names(names: npt.NDArray[np.object_], wanted: str) -> pl.Expr:
    """Whether an event has this name."""
    return pl.col("name").is_in(np.flatnonzero(names[:-1] == wanted).tolist())


def _kept_calls(calls: pl.DataFrame, gpu: pl.DataFrame) -> pl.DataFrame:
    """The calls that launched something recorded, synchronise or order streams; `role` says which."""
    launched = gpu["correlation"].unique()
    launches = pl.col("correlation").is_in(launched.implode()) & (pl.col("correlation") != NO_ID)
    return calls.filter(launches | pl.col("role").is_between(0, RECORD_EVENT - 1)).with_columns(
        role=pl.when(launches).then(0).otherwise("role")
    )


def _launches(gpu: pl.DataFrame, calls: pl.DataFrame) -> Ints:
    """The row of the call that launched each GPU op, -1 where it was not recorded. A graph launches many."""
    first = calls.with_row_index("row").filter(pl.col("role") == 0).unique("correlation", keep="first")
    found = gpu.select("correlation").join(
        first.select("correlation", "row"), on="correlation", how="left", maintain_order="left"
    )
    rows: Ints = found["row"].cast(pl.Int64).fill_null(-1).to_numpy()
    return np.where(gpu["correlation"].to_numpy() == NO_ID, -1, rows)


def _steps(annotations: pl.DataFrame, names: npt.NDArray[np.object_]) -> pl.DataFrame:
    """The marked steps, by start."""
    numbers = {code: int(found[1]) for code, name in enumerate(names) if (found := _STEP.match(name))}
    marked = annotations.filter(pl.col("name").is_in(list(numbers)))
    step = pl.Series([numbers[code] for code in marked["name"].to_list()], dtype=pl.Int64)
    return marked.select(start="ts", duration="dur").with_columns(step=step)


def _pauses(annotations: pl.DataFrame, names: npt.NDArray[np.object_]) -> pl.DataFrame:
    """What kept host threads from calling."""
    kinds = {code: kind for kind, pattern in _PAUSES for code, name in enumerate(names) if pattern.search(name)}
    found = annotations.filter(pl.col("name").is_in(list(kinds)))
    kind = pl.Series([kinds[code] for code in found["name"].to_list()], dtype=pl.String)
    return found.select("thread", start="ts", duration="dur").with_columns(kind=kind)


def _step_at(steps: pl.DataFrame, times: Floats) -> Ints:
    """The step that each time lies in, -1 for none."""
    begin = steps["start"].to_numpy()
    at = np.searchsorted(begin, times, side="right") - 1
    ends = np.append(begin + steps["duration"].to_numpy(), -np.inf)
    numbers = np.append(steps["step"].to_numpy(), -1)
    found: Ints = np.where((at >= 0) & (times <= ends[at]), numbers[at], -1)
    return found


class _Threads:
    """What the host threads of a rank were doing when they called."""

    def __init__(
        self, calls: pl.DataFrame, operators: pl.DataFrame, annotations: pl.DataFrame, names: npt.NDArray[np.object_]
    ) -> None:
        self._calls, self._names = calls, names
        self._operators, self._annotations = operators, annotations
        self._operator_around = self.containing(operators)

    def containing(self, spans: pl.DataFrame) -> Ints:
        """The row of the outermost of `spans` around the start of each call, on its thread; -1 for none."""
        found = np.full(self._calls.height, -1, np.int64)
        thread, started = self._calls["thread"].to_numpy(), self._calls["ts"].to_numpy()
        of_span = spans["thread"].to_numpy()
        begin, duration = spans["ts"].to_numpy(), spans["dur"].to_numpy()
        for one in np.unique(thread):
            mine, there = np.flatnonzero(thread == one), np.flatnonzero(of_span == one)
            if not len(there):
                continue
            outer = _outermost(begin[there], duration[there])
            rows = there[outer]
            at = np.searchsorted(begin[rows], started[mine], side="right") - 1
            holds = (at >= 0) & (started[mine] <= (begin + duration)[rows[at]])
            found[mine] = np.where(holds, rows[at], -1)
        return found

    def busy_since(self) -> Floats:
        """When the operator around each call began; its own start outside any."""
        begun = np.append(self._operators["ts"].to_numpy(), np.inf)[self._operator_around]
        times: Floats = np.minimum(begun, self._calls["ts"].to_numpy())
        return times

    def operators(self) -> list[str | None]:
        """The name of the outermost operator around each call."""
        codes = np.append(self._operators["name"].to_numpy(), -1)[self._operator_around]
        return [self._names[code] if code >= 0 else None for code in codes.tolist()]

    def phases(self) -> list[str]:
        """What phase of a step each call belongs to."""
        found = np.full(self._calls.height, DEFAULT_PHASE, dtype=object)
        for phase, pattern in reversed(_PHASES):
            codes = [code for code, name in enumerate(self._names) if pattern.search(name)]
            for spans in (self._operators, self._annotations):
                found[self.containing(spans.filter(pl.col("name").is_in(codes))) >= 0] = phase
        return found.tolist()

    def collective_names(self) -> list[str | None]:
        """What an annotation such as nccl:all_reduce calls the collective around each call."""
        named = {code: match[1] for code, name in enumerate(self._names) if (match := _NCCL_ANNOTATION.match(name))}
        spans = self._annotations.filter(pl.col("name").is_in(list(named)))
        codes = np.append(spans["name"].to_numpy(), -1)[self.containing(spans)]
        return [named.get(code) for code in codes.tolist()]


def _outermost(begin: Floats, duration: Floats) -> Ints:
    """Positions of the spans that lie in no other one; `begin` ascends."""
    ties = (begin[1:] == begin[:-1]).any()
    order = np.lexsort((-duration, begin)) if ties else np.arange(len(begin))
    end = (begin + duration)[order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    kept: Ints = np.sort(order[begin[order] >= before])
    return kept


def _named(
    collective: Ints, called: list[str | None], launch: Ints, args: tuple[CollectiveArgs, ...]
) -> tuple[Ints, tuple[CollectiveArgs, ...]]:
    """Collectives of which only an annotation knows the name get arguments that say it."""
    table = list(args)
    numbers: dict[str, int] = {}
    found = collective.copy()
    for row in np.flatnonzero((collective < 0) & (launch >= 0)):
        name = called[launch[row]]
        if name is not None:
            if name not in numbers:
                numbers[name] = len(table)
                table.append(CollectiveArgs(name, *[None] * 12))
            found[row] = numbers[name]
    return found, tuple(table)


def _recorded_waits(syncs: pl.DataFrame, calls: pl.DataFrame, all_calls: pl.DataFrame) -> dict[str, pl.Series]:
    """What recorded synchronisation says about the calls behind it: who waits, for which stream, as of when."""
    recorded_at = (
        dict(zip(all_calls["correlation"].to_list(), all_calls["ts"].to_list(), strict=True)) if syncs.height else {}
    )
    by_call = {
        correlation: (stream, waits_for, recorded_at.get(record))
        for correlation, stream, waits_for, record in syncs.select(
            "correlation", "stream", "waits_for_stream", "waits_for_record"
        ).iter_rows()
    }
    rows = [by_call.get(correlation, (None, None, None)) for correlation in calls["correlation"].to_list()]
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    types = (pl.Int64, pl.Int64, pl.Float64)
    names = ("waits_stream", "waits_for_stream", "recorded_at")
    return {name: pl.Series(values, dtype=kind) for name, values, kind in zip(names, columns, types, strict=True)}


__all__ = ["ROLES", "RankColumns", "ranks_of"]
