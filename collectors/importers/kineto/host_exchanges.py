"""The all-to-alls in recordings of torch.profiler without GPUs, such as of gloo: what the calls were given.

In: files, and folders searched with all below them. Out: a row for each rank of each all-to-all. They show what each
rank sends and receives, not how long anything takes on a GPU. Needs `record_shapes=True`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from tracekit.base.errors import FormatError
from tracekit.base.paths import read_whole
from tracekit.collectors.importers.kineto.event_columns import STEP
from tracekit.collectors.importers.sniff import traces_in

_CALL = "c10d::alltoall_base_"
#: Places of the rows received from and sent to each rank among the call's inputs.
_RECEIVED, _SENT = 3, 4
_ROWS = re.compile(r"\[\d{1,15}(, ?\d{1,15})*\]")
_LARGEST_FILE = 1 << 31
_SCHEMA = {"rank": pl.Int64, "step": pl.Int64, "start": pl.Float64, "rows_sent": pl.Int64, "rows_received": pl.Int64}


class _Args(msgspec.Struct):
    inputs: Any = msgspec.field(default=None, name="Concrete Inputs")


class _HostEvent(msgspec.Struct):
    ph: str = ""
    name: str | None = None
    ts: float | None = None
    dur: float | None = None
    args: _Args | None = None


class _Info(msgspec.Struct):
    rank: int | None = None


class _HostTrace(msgspec.Struct):
    events: list[_HostEvent] = msgspec.field(default_factory=list, name="traceEvents")
    info: _Info | None = msgspec.field(default=None, name="distributedInfo")


def host_exchanges(paths: Sequence[Path]) -> pl.DataFrame:
    """Return `group`, `step`, `rank`, `instance`, `row`, `start`, `rows_sent`, `rows_received`; empty if none.

    The k-th call of a step is the same all-to-all on all ranks. Raises FormatError if a file is no such trace.
    """
    calls_by_rank: list[pl.DataFrame] = []
    for file in (file for path in paths for file in (traces_in(path) if path.is_dir() else [path])):
        read = _read(file)
        steps = sorted(
            (event.ts, event.ts + (event.dur or 0.0), int(mark[1]))
            for event in read.events
            if event.ts is not None and (mark := STEP.match(event.name or ""))
        )
        calls = [(event.ts or 0.0, event.args) for event in read.events if event.ph == "X" and event.name == _CALL]
        calls.sort(key=lambda call: call[0])
        rank = len(calls_by_rank) if read.info is None or read.info.rank is None else read.info.rank
        rows = [
            (rank, _step(steps, start), start * 1e-6, _rows(args, _SENT), _rows(args, _RECEIVED))
            for start, args in calls
        ]
        calls_by_rank.append(pl.DataFrame(rows, _SCHEMA, orient="row"))
    if not calls_by_rank:
        return pl.DataFrame()
    calls_of_all = pl.concat(calls_by_rank).drop_nulls("step")
    return calls_of_all.with_columns(
        instance=pl.int_range(pl.len()).over("rank", "step"), group=pl.lit(""), row=pl.lit(0, pl.Int64)
    )


def _read(path: Path) -> _HostTrace:
    try:
        return msgspec.json.decode(read_whole(path, _LARGEST_FILE, "record fewer steps"), type=_HostTrace)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: damaged ({error}); copy or record it again") from None


def _step(steps: Sequence[tuple[float, float, int]], time: float) -> int | None:
    """The marked step around a time; 0 if the file marks none."""
    return next((step for begin, end, step in steps if begin <= time <= end), None if steps else 0)


def _rows(args: _Args | None, place: int) -> int | None:
    """The rows to or from all ranks, None if they were not recorded."""
    inputs = None if args is None else args.inputs
    text = inputs[place] if isinstance(inputs, list) and len(inputs) > place else None
    return sum(map(int, re.findall(r"\d+", text))) if isinstance(text, str) and _ROWS.fullmatch(text) else None
