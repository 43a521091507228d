"""The events of a Chrome-format JSON file, streamed: a file of any size is read in blocks of a few megabytes.

Most events become rows of numbers (`events.c`); the few with further arguments, and unusual ones, become `TraceEvent`s.
Writers of such files make mistakes (unescaped quotes, `inf`, a file cut off): an event that cannot be decoded is
repaired or counted as lost, without losing the others. What is no trace, but another recording of torch or of a GPU, is
named in the error.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from tracekit.base.errors import FormatError
from tracekit.base.limits import files_below
from tracekit.base.paths import Look, quoted, unpacked, unreadable
from tracekit.base.text import listed
from tracekit.collectors.importers.kineto._events import scan_events
from tracekit.collectors.importers.sniff import SQLITE

BLOCK_BYTES = 2 << 20
#: The events begin within this many bytes, after a description of the job and its devices.
LARGEST_HEAD_BYTES = 64 << 20
#: No event is longer, bytes: beyond this, the file is damaged.
LARGEST_EVENT_BYTES = 16 << 20
#: Number of events in a batch.
_ROWS = 1 << 15
_GZIP = b"\x1f\x8b"
_GZIP_BITS = 31
_PACKED_BYTES = 1 << 20
#: A gzip file that unpacks to more than that, and than so many times what was read of it, is no recording: profiles
#: shrink to a twentieth.
_MOST_UNPACKED_BYTES, _MOST_TIMES = 256 << 20, 200
_DAMAGED = cast("type[Exception]", isal_zlib.error)  # stubs declare an instance
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*\](?=\s*[,}]|\s*$)")
_STARTS_EVENT = re.compile(rb'\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id)"')
_NOT_FINITE = re.compile(rb"([:\[,]\s*)-?(?:inf|infinity|nan)(?=\s*[,}\]])", re.IGNORECASE)
_STRING_VALUE = re.compile(rb'("[^"\n]{1,80}"\s*:\s*")(.*?)("\s*(?=,\s*"[^"\n]{1,80}"\s*:|\}))', re.DOTALL)
_BARE_QUOTE = re.compile(rb'(?<!\\)"')


class CollectiveArgs(msgspec.Struct, frozen=True):
    """The arguments of a collective; None where they are missing.

    `sent`, `received`: rows to and from each rank of the group, such as [320, 626].
    """

    collective: str | None = msgspec.field(default=None, name="Collective name")
    elements: int | None = msgspec.field(default=None, name="In msg nelems")
    dtype: str | None = None
    group_size: int | None = msgspec.field(default=None, name="Group size")
    group_name: str | None = msgspec.field(default=None, name="Process Group Name")
    group_description: str | None = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    rank_in_group: int | None = msgspec.field(default=None, name="Rank")
    sequence: int | None = msgspec.field(default=None, name="Seq")
    comms_id: int | str | None = msgspec.field(default=None, name="Comms Id")
    source: int | None = msgspec.field(default=None, name="Src Rank")
    destination: int | None = msgspec.field(default=None, name="Dst Rank")
    sent: Any = msgspec.field(default=None, name="In split size")
    received: Any = msgspec.field(default=None, name="Out split size")


class Args(CollectiveArgs, frozen=True, gc=False):
    """The arguments read of an event."""

    correlation: int | str | None = None
    device: int | str | None = None
    stream: int | str | None = None
    size: Any = msgspec.field(default=None, name="bytes")
    occupancy: Any = msgspec.field(default=None, name="est. achieved occupancy %")
    device_type: Any = msgspec.field(default=None, name="Device Type")
    device_id: Any = msgspec.field(default=None, name="Device Id")
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    reserved: Any = msgspec.field(default=None, name="Total Reserved")
    grid: Any = None
    block: Any = None
    dims: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")
    wait_on_stream: int | None = None
    wait_on_record: int | None = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


class TraceEvent(msgspec.Struct, gc=False):
    """The fields read of an event; `ts` and `dur` in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: Args | None = None


_EVENT = msgspec.json.Decoder(TraceEvent, strict=False)


class Column(IntEnum):
    """Columns of the rows of `EventBatch`. Texts have a hash and a position; missing values are -1."""

    CATEGORY = 0  #: its position in the wanted categories
    ODD = 1  #: 1 if the row must be decoded as an `TraceEvent`
    PID = 2
    TID = 3
    NAME = 4
    NAME_BEGIN = 5
    NAME_END = 6
    CORRELATION = 7
    DEVICE = 8
    STREAM = 9
    SHAPE = 10
    FIRST_BEGIN = 11  #: of a kernel, its grid; of an operator, the sizes of its inputs
    FIRST_END = 12
    SECOND_BEGIN = 13  #: of a kernel, its block; of an operator, the types of its inputs
    SECOND_END = 14
    SIZE = 15  #: bytes of a copy; of a kernel, its estimated occupancy in percent
    BEGIN = 16
    END = 17


class _Stop(IntEnum):
    """The reasons why `scan_events` stops."""

    INCOMPLETE = 0
    AT_END = 1
    DAMAGED = 2
    FULL = 3


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Complete events of the wanted categories: `rows`, [Column, events], and `times`, [start and duration, events].

    Times are microseconds, positions in rows are offsets in `text`. `events`: the events of rows marked ODD. Rows and
    times are overwritten by the next batch.
    """

    text: bytes
    rows: npt.NDArray[np.int64]
    times: npt.NDArray[np.float64]
    events: list[TraceEvent]


@dataclass(slots=True)
class EventStream:
    """Iterates over batches of the events of one file; sets `header` and the losses afterwards. `categories`: the
    wanted ones, in small letters. `lost`: events that could not be decoded. `cut`: why the file ends too early, None
    if it is whole. `bytes_read`: unpacked bytes of JSON.
    """

    path: Path
    categories: Sequence[str]
    lost: int = 0
    cut: str | None = None
    bytes_read: int = 0
    _head: bytes = b""
    _tail: bytes = b""
    _rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((len(Column), _ROWS), np.int64))
    _times: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((2, _ROWS)))

    def __iter__(self) -> Iterator[EventBatch]:
        """Yield the batches. Raises FormatError if the file cannot be read or holds no events."""
        try:
            with self.path.open("rb") as raw:
                yield from self._batches(raw)
        except OSError as error:
            raise unreadable(self.path, error) from None

    def header(self) -> dict[str, Any]:
        """Return the header around the events; empty if it is damaged."""
        inside = self._tail if self._tail.strip() else b"}"
        for text in (self._head + b"]" + inside, self._head + b"]}"):
            try:
                header = msgspec.json.decode(_without_infinities(text))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            return header if isinstance(header, dict) else {}
        return {}

    def _blocks(self, raw: IO[bytes]) -> Iterator[bytes]:
        """Yield the file in unpacked pieces; as much as can be unpacked if it is cut off or damaged."""
        packed = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        try:
            for block in _unpacked(raw) if packed else iter(lambda: raw.read(BLOCK_BYTES), b""):
                self.bytes_read += len(block)
                if packed and self.bytes_read > max(_MOST_UNPACKED_BYTES, _MOST_TIMES * raw.tell()):
                    raise FormatError(
                        f"{self.path}: unpacks to more than {_MOST_TIMES} times its size, as no recording does; copy or"
                        " record it again"
                    )
                yield block
        except _CutError as error:
            self.cut = f"its gzip stream is damaged or cut off ({error})"

    def _batches(self, file: IO[bytes]) -> Iterator[EventBatch]:
        blocks = self._blocks(file)
        rest = self._find_events(blocks)
        for block in blocks:
            if self._tail:
                self._tail += block
            else:
                rest = yield from self._scan(rest + block, last=False)
        if not self._tail:
            yield from self._scan(rest, last=True)
            if not self._tail and self.cut is None:
                self.cut = "the JSON is cut off or damaged"

    def _scan(self, text: bytes, *, last: bool) -> Generator[EventBatch, None, bytes]:
        """Scan the whole events of `text`; return the rest of it, which continues in the next block."""
        wanted = "".join(f"{name}\n" for name in self.categories).encode()
        position = 0
        while not self._tail:
            count, position, why = scan_events(text, position, wanted, self._rows, self._times)
            if count:
                yield self._batch(text, self._rows[:, :count], self._times[:, :count])
            if why == _Stop.AT_END:
                self._tail = text[position:] or b" "
            elif why != _Stop.FULL:
                may_wait = not last and len(text) - position <= LARGEST_EVENT_BYTES
                if why == _Stop.INCOMPLETE and may_wait:
                    return text[position:]
                end, after = _next_event(text, position)
                if end < 0 and may_wait:
                    return text[position:]
                events = self._repair(text, position, len(text) if end < 0 else end)
                yield EventBatch(text, self._rows[:, :0], self._times[:, :0], events)
                position = len(text) if end < 0 else after
                if end < 0:
                    return b""
        return b""

    def _batch(self, text: bytes, rows: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> EventBatch:
        odd = np.flatnonzero(rows[Column.ODD])
        pieces = [text[begin:end] for begin, end in rows[[Column.BEGIN, Column.END]][:, odd].T.tolist()]
        recovered = [decoded(piece) or decoded(_repaired(piece)) for piece in pieces]
        events = [event for event in recovered if event is not None]
        self.lost += len(recovered) - len(events)
        return EventBatch(text, rows, times, events)

    def _repair(self, text: bytes, begin: int, end: int) -> list[TraceEvent]:
        """Recover an event from a damaged piece, which may be the last one and include the text after all events."""
        piece = text[begin:end]
        event = decoded(piece.rstrip().rstrip(b",]")) or decoded(_repaired(piece))
        if event is not None:
            return [event]
        for end_match in _END.finditer(piece):
            event = decoded(before := piece[: end_match.start() + 1]) or decoded(_repaired(before))
            if event is not None:
                self._tail = text[begin + end_match.end() :] or b" "
                return [event]
        self.lost += bool(piece.strip())
        return []

    def _find_events(self, blocks: Iterator[bytes]) -> bytes:
        """Read up to the first event; return the part of the events that was read with it."""
        head = b""
        for block in blocks:
            head += block
            if head.lstrip()[:1] == b"[":
                begin = head.index(b"[") + 1
                self._head = b'{"traceEvents": ['
                return head[begin:]
            if match := _BEGIN.search(head):
                self._head = head[: match.end()]
                return head[match.end() :]
            if len(head) > LARGEST_HEAD_BYTES or head.lstrip()[:1] != b"{":
                break
        if self.cut is not None:
            raise FormatError(f"{self.path}: {self.cut}, before its first event; copy or record it again")
        if not head.strip():
            raise FormatError(f"{self.path}: empty; expected a trace of torch.profiler")
        otherwise = "not JSON with traceEvents; expected a trace of torch.profiler (JSON, may be gzipped)"
        raise FormatError(f"{self.path}: {kind_of_recording(head) or otherwise}")


class _CutError(Exception):
    """A gzip stream ends too early, or its content is damaged."""


def _unpacked(raw: IO[bytes]) -> Iterator[bytes]:
    """Yield a gzip file of any number of members, unpacked piece by piece. Raises _CutError after the whole pieces."""
    stream, packed, began = isal_zlib.decompressobj(wbits=_GZIP_BITS), b"", False
    while True:
        packed = packed or raw.read(_PACKED_BYTES)
        if not packed:
            if began:
                raise _CutError("it ends too early")
            return
        began = True
        try:
            block = stream.decompress(packed, BLOCK_BYTES)
        except _DAMAGED as error:
            raise _CutError(error) from None
        if block:
            yield block
        packed = stream.unconsumed_tail
        if stream.eof:
            packed, began = stream.unused_data.lstrip(b"\0"), False
            stream = isal_zlib.decompressobj(wbits=_GZIP_BITS)


def _next_event(text: bytes, position: int) -> tuple[int, int]:
    """Return the end of the event at `position` and the start of the next event's first key; (-1, -1) for none."""
    for boundary in _BOUNDARY.finditer(text, position):
        if _STARTS_EVENT.match(text, boundary.end()):
            return boundary.start() + 1, boundary.end()
    return -1, -1


def decoded(text: bytes) -> TraceEvent | None:
    """Decode an event; None if the text is none."""
    try:
        return _EVENT.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _repaired(text: bytes) -> bytes:
    """Correct common errors of such files in `text`: infinities, unescaped quotes, invalid bytes."""
    text = _without_infinities(text.decode("utf-8", "replace").encode())
    return _STRING_VALUE.sub(lambda match: match[1] + _BARE_QUOTE.sub(rb"\\" + b'"', match[2]) + match[3], text)


def _without_infinities(text: bytes) -> bytes:
    return _NOT_FINITE.sub(rb"\1null", text)


_PICKLE = b"\x80"
#: Keys of a memory snapshot, at its beginning.
_SNAPSHOT = (b"segments", b"device_traces")
_SNAPSHOT_IS = (
    "a memory snapshot of torch.cuda.memory, which shows what uses memory, not what takes time; record a trace with"
    " torch.profiler.profile, or open the snapshot at pytorch.org/memory_viz"
)
_GRAPH_IS = (
    "an execution trace of torch.profiler.ExecutionTraceObserver, which has no GPU times; give the trace that"
    " export_chrome_trace writes"
)
_EXPORT = "nsys export --type sqlite"
_SQLITE_IS = f"a SQLite file, but not an export of Nsight Systems, or a packed one; give what `{_EXPORT} REPORT` wrote"
_ASKS_FOR_JSON = "which is not read; record with torch.profiler and give the JSON that its export_chrome_trace writes"
#: Endings of files that their first bytes do not tell -> what they are.
_ENDINGS = {
    ".nsys-rep": f"a report of Nsight Systems; convert it: `{_EXPORT} {{}}`",
    ".qdrep": f"a report of Nsight Systems; convert it: `{_EXPORT} {{}}`",
    ".sqlite": f"not a SQLite file, which an export of Nsight Systems is; copy it again, or `{_EXPORT} REPORT`",
    ".xplane.pb": f"a trace of XLA's profiler, {_ASKS_FOR_JSON}",
    ".et": f"an execution trace of Chakra, {_ASKS_FOR_JSON}",
}
#: What follows the name of an accelerator.
ACCELERATOR_IS = (
    "an accelerator that tracekit does not know: record on CUDA or ROCm GPUs, or write its ops as an op trace"
    " (docs/traces.md)"
)
#: Words of accelerators that are no GPUs, in names and categories of events, looked for in so many bytes.
_ACCELERATORS = {
    "Ascend NPUs": rb'"Ascend Hardware"|"name"\s*:\s*"CANN"|"labels"\s*:\s*"NPU"',
    "MTIA": rb'"cat"\s*:\s*"mtia_',
    "HPU (Habana)": rb'"cat"\s*:\s*"hpu_|"(?:name|labels)"\s*:\s*"(?:HPU|Habana|Gaudi)\b',
    "AIU (Spyre)": rb'"(?:cat|name|labels)"\s*:\s*"[^"]{0,40}\b(?:AIU|Spyre|sendnn)',
    "XLA devices (TPU)": rb'"name"\s*:\s*"(?:/device:TPU|XLA Ops|XLA Modules|TPU )',
    "Neuron devices": rb'"(?:name|labels)"\s*:\s*"(?:Neuron|NC)[ _]?(?:Core|Device|\d)',
    "PRIVATEUSE1": rb'"cat"\s*:\s*"privateuse1_',
}
_ACCELERATOR = re.compile(b"|".join(b"(%s)" % words for words in _ACCELERATORS.values()), re.IGNORECASE)
#: Categories of events of torch.profiler on a machine without accelerators.
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{1,60})"')
_OF_HOSTS = frozenset(
    b"cpu_op user_annotation python_function cpu_instant_event overhead Trace ac2g async_cpu_to_gpu fwdbwd Operator"
    b" forward_backward cuda_runtime cuda_driver cuda_sync cuda_profiler_range Runtime Kernel".split()
)
_LOOKED_AT = 64 << 20
#: Most files of a folder to inspect.
_MOST_FILES = 1000


def other_recording(look: Look) -> str | None:
    """Return what a file, or a file in a folder, is instead of a trace; None if unknown or unreadable."""
    if not look.is_folder:
        return kind_of_recording(look.text) or _by_name(look.path)
    for file in map(Look, itertools.islice(files_below(look.path), _MOST_FILES)):
        if kind := kind_of_recording(file.text) or _by_name(file.path):
            return f"{file.name} is {kind}"
    return None


def kind_of_recording(head: bytes) -> str | None:
    """Return the kind of recording, other than a trace, that begins with these unpacked bytes; None if unknown."""
    start = head.lstrip()[:4096]
    if start.startswith(_PICKLE) and any(key in start for key in _SNAPSHOT):
        return _SNAPSHOT_IS
    if start.startswith(b"{") and any(b'"' + key + b'"' in start for key in _SNAPSHOT):
        return _SNAPSHOT_IS
    if head.startswith(SQLITE):
        return _SQLITE_IS
    if start.startswith(b"{") and b'"schema"' in start and b'"nodes"' in start:
        return _GRAPH_IS
    if start.startswith(b"[") and (match := _ACCELERATOR.search(head)) is not None and match.lastindex is not None:
        return f"a trace of {list(_ACCELERATORS)[match.lastindex - 1]}, {ACCELERATOR_IS}"
    return None


def other_accelerator(file: Path, *, of_torch: bool) -> str | None:
    """Return the accelerators whose events a trace without GPU ops holds, such as "MTIA"; None for none. `of_torch`: it
    has events of torch, so that categories which torch does not have are those of an accelerator.
    """
    head = unpacked(Look(file).beginning(_LOOKED_AT))
    if (match := _ACCELERATOR.search(head)) is not None and match.lastindex is not None:
        return list(_ACCELERATORS)[match.lastindex - 1]
    if not of_torch:
        return None
    unknown = sorted(set(_CATEGORY.findall(head)) - _OF_HOSTS)
    return f"the categories {listed([name.decode(errors='replace') for name in unknown], 4)}" if unknown else None


def _by_name(file: Path) -> str | None:
    return next((what.format(quoted(file)) for end, what in _ENDINGS.items() if file.name.endswith(end)), None)
