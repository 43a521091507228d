"""Importer of the timelines that `tracekit export` writes: the recorded one comes back as the trace it was.

In: a `.json.gz` file, or the same unpacked. Out: a `Trace` of the steps in the file, with name, layout, ranks, step
starts and metadata; times to the picosecond the file is written with. The replayed timelines are left where they are.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tracekit.chrome import END, MARK, RECORDED, SEPARATOR, VERSION
from tracekit.collectors.formats import refuse_unit
from tracekit.errors import FormatError, LayoutError
from tracekit.model import Layout, Unit
from tracekit.trace import Trace

_GZIP = b"\x1f\x8b"
_HEAD_BYTES = 4096
_HEADER = re.compile(r'"otherData"\s*:\s*(?={)')
_HOW = "a timeline is read back from a file of `tracekit export`; record or export it again"
_PLACE = ("step", "dp_rank", "pp_rank", "seq", "microbatch", "chunk")
#: What is read of an event. Metadata events lack most of it.
_EVENT = pl.Struct(
    {
        "ph": pl.String,
        "name": pl.String,
        "pid": pl.Int64,
        "ts": pl.Float64,
        "dur": pl.Float64,
        "args": pl.Struct(dict.fromkeys(_PLACE, pl.Int64)),
    }
)


@dataclass(frozen=True, slots=True)
class _Header:
    """What the file says about the job. `first_pid`: process id of the first worker's recorded timeline."""

    name: str
    layout: Layout
    workers: pl.DataFrame
    first_pid: int
    step_starts_us: pl.DataFrame
    step_starts: Mapping[int, float]
    metadata: Mapping[str, Any]


class ExportedImporter:
    """Timelines tracekit wrote."""

    name = "tracekit-chrome"
    description = "Chrome trace of `tracekit export` (.json.gz or .json): its recorded timeline"

    def sniff(self, path: Path) -> bool:
        """JSON, packed or not, with tracekit's mark in its head."""
        return f'"{MARK}"'.encode() in _head(path)

    def read(self, path: Path, *, layout: Path | None = None, unit: Unit | None = None) -> Trace:
        """The trace of the steps that were exported. Raises FormatError where the file is damaged or another's."""
        if layout is not None:
            raise FormatError(f"{path}: a timeline of `tracekit export` carries its layout; leave out --layout")
        refuse_unit(path, unit, "a timeline of `tracekit export`")
        text = _text(path)
        header = _header(text, path)
        return Trace.from_frame(
            _recorded(_events(text, path), header),
            header.layout,
            name=header.name,
            step_starts=header.step_starts,
            metadata=header.metadata,
            source=str(path),
        )


def _head(path: Path) -> bytes:
    """The first bytes of the unpacked file, none where it is damaged there."""
    if path.is_dir():
        return b""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.startswith(_GZIP):
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
    except zlib.error:
        return b""


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if content.startswith(_GZIP) else content).decode()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # before OSError, which BadGzipFile is too
        raise FormatError(f"{path}: its gzip stream is damaged ({error}); copy or export it again") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}; check path and permissions") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not JSON ({error}); {_HOW}") from None


def _header(text: str, path: Path) -> _Header:
    found = _HEADER.search(text)
    if found is None:
        raise FormatError(f"{path}: no `otherData` of tracekit inside; {_HOW}")
    try:
        content, _ = json.JSONDecoder().raw_decode(text, found.end())
        if content.get(MARK) != VERSION:
            raise FormatError(
                f"{path}: {MARK} is {content.get(MARK)!r}, this tracekit reads version {VERSION}; export it again"
            )
        workers = pl.DataFrame(
            content["workers"], schema=dict.fromkeys(("dp_rank", "pp_rank", "rank"), pl.Int64), orient="row"
        )
        starts_us = {int(step): float(start) for step, start in content["step_starts_us"].items()}
        return _Header(
            name=str(content["name"]),
            layout=Layout.from_dict(content["layout"]),
            workers=workers,
            first_pid=1 + content["timelines"].index(RECORDED) * workers.height,
            step_starts_us=pl.DataFrame(
                {"step": list(starts_us), "step_start_us": list(starts_us.values())},
                schema={"step": pl.Int64, "step_start_us": pl.Float64},
            ),
            step_starts={int(step): float(start) for step, start in content["step_starts"].items()},
            metadata=dict(content["metadata"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, pl.exceptions.PolarsError) as error:
        raise FormatError(f"{path}: damaged `otherData` ({error!r:.120}); export it again") from None
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from None


def _events(text: str, path: Path) -> pl.DataFrame:
    """All events, in file order."""
    try:
        lines = pl.Series(_event_lines(text), dtype=pl.String)
        return lines.str.json_decode(_EVENT).struct.unnest()
    except (ValueError, KeyError, TypeError, RecursionError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"{path}: not the JSON of a timeline ({reason:.160}); it may be truncated, {_HOW}") from None


def _event_lines(text: str) -> list[str]:
    """The JSON of each event. A file that is laid out as it was written need not be parsed as a whole."""
    if text.endswith(END):
        return text.removesuffix(END).split("[\n", 1)[-1].split(SEPARATOR)
    return [json.dumps(event) for event in json.loads(text)["traceEvents"]]


def _recorded(events: pl.DataFrame, header: _Header) -> pl.DataFrame:
    """The slices of the recorded timeline as canonical columns; times from the start of their step, seconds."""
    last_pid = header.first_pid + header.workers.height - 1
    slices = events.filter((pl.col("ph") == "X") & pl.col("pid").is_between(header.first_pid, last_pid))
    placed = (
        slices.unnest("args")
        .join(header.workers, on=["dp_rank", "pp_rank"], how="left", maintain_order="left")
        .join(header.step_starts_us, on="step", how="left", maintain_order="left")
    )
    return placed.with_columns(
        kind=pl.col("name"),
        start=(pl.col("ts") - pl.col("step_start_us")) / 1e6,
        duration=pl.col("dur") / 1e6,
    )
