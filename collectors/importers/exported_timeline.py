"""Importer of the timelines that `tracekit export` writes: turns the recorded one back into its trace.

In: a `.json.gz` file, or the same unpacked. Out: a `Trace` of the steps in the file, with name, layout, ranks, step
starts and metadata; times are exact to the picosecond, as in the file. The replayed timelines are ignored.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tracekit.base.errors import FormatError, LayoutError
from tracekit.base.text import quoted
from tracekit.collectors.importers.formats import refuse_unit
from tracekit.trace.canonical import Trace
from tracekit.trace.chrome import END, MARK, OPS_MARK, RECORDED, VERSION
from tracekit.trace.model import Layout, Unit

_GZIP = b"\x1f\x8b"
_HEAD_BYTES = 4096
_CHUNK_BYTES = 1 << 24
#: Most unpacked bytes of a file: 12 million slices. Less for a file that must be held in memory as a whole, and only
#: below that size more than this many times larger than it is packed (exports: 10 to 20 times).
LARGEST_BYTES = 1 << 31
LARGEST_WHOLE_BYTES = 1 << 28
LARGEST_RATIO = 200
_HEADER = re.compile(r'"otherData"\s*:\s*(?={)')
_HOW = "expected a timeline written by `tracekit export`; export it again"
#: After the events.
_LAST_LINE = END.strip()
_PLACE = ("step", "dp_rank", "pp_rank", "seq", "microbatch", "chunk")
#: The fields read of an event. Metadata events lack most of them.
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
    """The header's facts about the job. `first_pid`: process id of the first worker's recorded timeline."""

    name: str
    layout: Layout
    workers: pl.DataFrame
    first_pid: int
    step_starts_us: pl.DataFrame
    step_starts: Mapping[int, float]
    metadata: Mapping[str, Any]


class ExportedImporter:
    """Timelines written by tracekit."""

    name = "tracekit-chrome"
    description = "Chrome trace of `tracekit export` (.json.gz or .json): its recorded timeline"

    def sniff(self, path: Path) -> bool:
        """Recognise JSON, packed or not, with tracekit's mark in its head."""
        return f'"{MARK}"'.encode() in _head(path)

    def read(self, path: Path, *, layout: Path | None = None, unit: Unit | None = None) -> Trace:
        """Read the exported steps. Raises FormatError if the file is damaged or not an exported timeline."""
        if layout is not None:
            raise FormatError(f"{path}: a timeline of `tracekit export` carries its layout; leave out --layout")
        refuse_unit(path, unit, "a timeline of `tracekit export`")
        batches = _batches(path)
        text = next(batches)[0]
        header = _header(text, path)
        return Trace.from_frame(
            _recorded(_events(batches, text, header, path), header),
            header.layout,
            name=header.name,
            step_starts=header.step_starts,
            metadata=header.metadata,
            source=str(path),
        )


def _head(path: Path) -> bytes:
    """Return the first bytes of the unpacked file; empty if it is damaged there."""
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


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the unpacked file in pieces. Raises FormatError if it is damaged or unpacks to more than the limit."""
    unpacked = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(_GZIP)) == _GZIP
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if packed else raw as file:
                while chunk := file.read(_CHUNK_BYTES):
                    unpacked += len(chunk)
                    bomb = packed and unpacked > LARGEST_WHOLE_BYTES and unpacked > LARGEST_RATIO * raw.tell()
                    if bomb or unpacked > LARGEST_BYTES:
                        size = f"{LARGEST_RATIO} times its size" if bomb else f"{LARGEST_BYTES >> 20} MiB"
                        raise FormatError(f"{path}: unpacks to more than {size}; export fewer steps with --steps")
                    yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # before OSError, which BadGzipFile is too
        raise FormatError(f"{path}: its gzip stream is damaged ({error}); copy or export it again") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}; check path and permissions") from None


def _batches(path: Path) -> Iterator[list[str]]:
    """Yield the first line alone, then batches of the following lines, without line ends.

    A file that is not laid out by `tracekit export` is one batch of one line.
    """
    rest, first = bytearray(), True
    for chunk in _chunks(path):
        rest += chunk
        if b"\n" not in chunk:
            if len(rest) > LARGEST_WHOLE_BYTES:
                raise FormatError(f"{path}: has a line of more than {LARGEST_WHOLE_BYTES >> 20} MiB; {_HOW}")
            continue
        if first:
            line, _, rest = rest.partition(b"\n")
            if not line.endswith(b"["):
                break
            yield [_decoded(line, path)]
            first = False
        whole, newline, rest = rest.rpartition(b"\n")
        if newline:
            yield _decoded(whole, path).split("\n")
    if first:
        yield [_decoded(_whole(path), path)]
    elif rest:
        yield [_decoded(rest, path)]


def _whole(path: Path) -> bytes:
    """Return the whole unpacked file, which must fit into memory."""
    content = bytearray()
    for chunk in _chunks(path):
        content += chunk
        if len(content) > LARGEST_WHOLE_BYTES:
            raise FormatError(
                f"{path}: larger than {LARGEST_WHOLE_BYTES >> 20} MiB, and not laid out by `tracekit export`; {_HOW}"
            )
    return bytes(content)


def _decoded(content: bytes | bytearray, path: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not JSON ({error}); {_HOW}") from None


def _header(text: str, path: Path) -> _Header:
    found = _HEADER.search(text)
    if found is None:
        raise FormatError(f"{path}: has no `otherData` of tracekit; {_HOW}")
    try:
        content, _ = json.JSONDecoder().raw_decode(text, found.end())
        if content.get(MARK) != VERSION:
            raise FormatError(
                f"{path}: {MARK} is {quoted(content.get(MARK))}, but this tracekit reads version {VERSION}; export it"
                " again"
            )
        if content.get(OPS_MARK):
            raise FormatError(f"{path}: a timeline of an op trace, which cannot be read back; use the op trace itself")
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


def _events(batches: Iterator[list[str]], text: str, header: _Header, path: Path) -> pl.DataFrame:
    """Return the slices of the recorded timeline, in file order. `text`: the first of the batches."""
    try:
        if not text.endswith("["):
            return _slices([json.dumps(event) for event in json.loads(text)["traceEvents"]], header)
        frames, ended = [_slices([], header)], False
        for lines in batches:
            if ended and any(lines):
                raise ValueError("data after its end")  # noqa: TRY301 - one message for all
            ended = ended or _LAST_LINE in lines[-2:]
            events = [line.removesuffix(",") for line in lines if line not in {"", _LAST_LINE}]
            frames.append(_slices(events, header))
        if not ended:
            raise ValueError("its end is missing")  # noqa: TRY301
        return pl.concat(frames)
    except (ValueError, KeyError, TypeError, RecursionError, pl.exceptions.PolarsError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise FormatError(f"{path}: not a complete timeline ({reason:.160}); {_HOW}") from None


def _slices(lines: list[str], header: _Header) -> pl.DataFrame:
    """Return the slices of the recorded timeline among these events."""
    events = pl.Series(lines, dtype=pl.String).str.json_decode(_EVENT).struct.unnest()
    last_pid = header.first_pid + header.workers.height - 1
    return events.filter((pl.col("ph") == "X") & pl.col("pid").is_between(header.first_pid, last_pid))


def _recorded(slices: pl.DataFrame, header: _Header) -> pl.DataFrame:
    """`slices` of the recorded timeline as canonical columns; times from the start of their step, seconds."""
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
