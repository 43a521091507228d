"""Importer of the timelines that `tracekit export` writes: turns the recorded one back into its trace.

In: a `.json.gz` file, or the same unpacked. Out: a `Trace` of the steps in the file, with name, layout, ranks, step
starts and metadata; times are exact to the picosecond, as in the file. The replayed timelines are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from tracekit.base.errors import FormatError, LayoutError
from tracekit.base.text import quoted
from tracekit.collectors.importers.formats import read_whole, refuse_options
from tracekit.collectors.importers.kineto.sniff import first_bytes
from tracekit.trace.canonical import Trace
from tracekit.trace.chrome import MARK, OPS_MARK, RECORDED, VERSION
from tracekit.trace.model import Layout, Unit

#: What a file may unpack to: 3 million slices; an export has at most 2 million.
LARGEST_BYTES = 1 << 29


class _Place(msgspec.Struct, gc=False):
    """Where an op belongs."""

    step: int = -1
    dp_rank: int = -1
    pp_rank: int = -1
    seq: int | None = None
    microbatch: int | None = None
    chunk: int | None = None


class _Event(msgspec.Struct, gc=False):
    """What is read of an event; times in microseconds. Events other than slices lack most of it."""

    ph: str = ""
    name: str = ""
    pid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: _Place | None = None


class _Other(msgspec.Struct):
    """What the file says about the job, where `write_chrome` wrote it."""

    name: str
    layout: dict[str, Any]
    workers: list[tuple[int, int, int]]
    timelines: list[str]
    step_starts_us: dict[int, float]
    step_starts: dict[int, float]
    metadata: dict[str, Any]


class _File(msgspec.Struct):
    other: msgspec.Raw = msgspec.field(name="otherData", default_factory=lambda: msgspec.Raw(b"{}"))
    events: list[_Event] = msgspec.field(name="traceEvents", default_factory=list)


class ExportedImporter:
    """Timelines written by tracekit."""

    name = "tracekit-chrome"
    description = "Chrome trace of `tracekit export` (.json.gz or .json): its recorded timeline"

    def sniff(self, path: Path) -> bool:
        """JSON, packed or not, with tracekit's mark in its head."""
        return f'"{MARK}"'.encode() in first_bytes(path, 4096)

    def read(self, path: Path, *, layout: Path | None = None, unit: Unit | None = None) -> Trace:
        """The trace of the steps that were exported. Raises FormatError if the file is damaged or another's."""
        refuse_options(path, layout, unit, "a timeline of `tracekit export`")
        try:
            content = read_whole(path, LARGEST_BYTES, "export fewer steps with --steps")
            file = msgspec.json.decode(content, type=_File)
            other = _other(file.other, path)
            return Trace.from_frame(
                _recorded(file.events, other),
                Layout.from_dict(other.layout),
                name=other.name,
                step_starts=other.step_starts,
                metadata=other.metadata,
                source=str(path),
            )
        except msgspec.MsgspecError as error:
            raise FormatError(
                f"{path}: not a complete timeline ({error!s:.160}); expected one written by `tracekit export`;"
                " export it again"
            ) from None
        except LayoutError as error:
            raise LayoutError(f"{path}: {error}") from None


def _other(text: msgspec.Raw, path: Path) -> _Other:
    """Raises FormatError if this version does not read such a file back, and what decoding raises."""
    content = msgspec.json.decode(text)
    version = content.get(MARK) if isinstance(content, dict) else None
    if version != VERSION:
        raise FormatError(
            f"{path}: {MARK} is {quoted(version)}, but this tracekit reads version {VERSION}; export it again"
        )
    if content.get(OPS_MARK):
        raise FormatError(f"{path}: a timeline of an op trace, which cannot be read back; use the op trace itself")
    return msgspec.json.decode(text, type=_Other)


def _recorded(events: list[_Event], other: _Other) -> pl.DataFrame:
    """The slices of the recorded timeline as canonical columns; times from the start of their step, seconds."""
    first_pid = 1 + other.timelines.index(RECORDED) * len(other.workers)
    pids = range(first_pid, first_pid + len(other.workers))
    slices = [one for one in events if one.ph == "X" and one.pid in pids]
    ranks = {(dp_rank, pp_rank): rank for dp_rank, pp_rank, rank in other.workers}
    places = [one.args or _Place() for one in slices]
    starts_us = pl.Series([other.step_starts_us.get(place.step) for place in places], dtype=pl.Float64)
    return pl.DataFrame(
        {
            **{
                name: pl.Series([getattr(place, name) for place in places], dtype=pl.Int64)
                for name in _Place.__struct_fields__
            },
            "rank": pl.Series([ranks.get((place.dp_rank, place.pp_rank)) for place in places], dtype=pl.Int64),
            "kind": pl.Series([one.name for one in slices], dtype=pl.String),
            "start": (pl.Series([one.ts for one in slices], dtype=pl.Float64) - starts_us) / 1e6,
            "duration": pl.Series([one.dur for one in slices], dtype=pl.Float64) / 1e6,
        }
    )
