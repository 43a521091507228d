"""The events of a Chrome-format JSON file, streamed: a file of any size is read in blocks of a few megabytes.

In: a path, gzipped or not. Out: batches of `Event`, then what stood around them. Writers of such files make mistakes
(unescaped quotes, `inf`, a file cut off); an event that cannot be decoded is repaired or counted as lost, never all
others with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec
from isal import isal_zlib

from tracekit.errors import FormatError

BLOCK_BYTES = 4 << 20
#: The events begin within the first this many bytes: what stands before them describes the job and its devices.
LARGEST_HEAD_BYTES = 64 << 20
#: No event is longer: what goes on beyond is damage.
LARGEST_EVENT_BYTES = 16 << 20
#: Ends of lists that are tried as the end of all events.
_ENDS_TRIED = 8
_GZIP = b"\x1f\x8b"
_GZIP_BITS = 31
_PACKED_BYTES = 1 << 20
_DAMAGED = cast("type[Exception]", isal_zlib.error)  # stubs declare an instance
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*\](?=\s*[,}]|\s*$)")
_NOT_FINITE = re.compile(rb"([:\[,]\s*)-?(?:inf|infinity|nan)(?=\s*[,}\]])", re.IGNORECASE)
_STRING_VALUE = re.compile(rb'("[^"\n]{1,80}"\s*:\s*")(.*?)("\s*(?=,\s*"[^"\n]{1,80}"\s*:|\}))', re.DOTALL)
_BARE_QUOTE = re.compile(rb'(?<!\\)"')


class Args(msgspec.Struct, gc=False):
    """What is read of an event's arguments."""

    correlation: int | str | None = None
    device: int | str | None = None
    stream: int | str | None = None
    grid: Any = None
    block: Any = None
    collective: str | None = msgspec.field(default=None, name="Collective name")
    elements_in: int | None = msgspec.field(default=None, name="In msg nelems")
    elements_out: int | None = msgspec.field(default=None, name="Out msg nelems")
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
    wait_on_stream: int | None = None
    wait_on_record: int | None = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


class Event(msgspec.Struct, gc=False):
    """What is read of an event; `ts` and `dur` in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: Args | None = None


_EVENTS = msgspec.json.Decoder(list[Event])
_EVENT = msgspec.json.Decoder(Event, strict=False)


@dataclass(slots=True)
class EventStream:
    """Batches of the events of one file, by iteration; afterwards `header` and what could not be read.

    `lost`: events that could not be decoded. `cut`: why the file ends too early, None where it is whole. `bytes_read`:
    of JSON, unpacked.
    """

    path: Path
    lost: int = 0
    cut: str | None = None
    bytes_read: int = 0
    _head: bytes = b""
    _tail: bytes = b""

    def __iter__(self) -> Iterator[list[Event]]:
        """Raises FormatError where the file cannot be read or holds no events."""
        try:
            with self.path.open("rb") as raw:
                yield from self._batches(raw)
        except OSError as error:
            reason = error.strerror or error
            raise FormatError(f"{self.path}: cannot be read: {reason}; check path and permissions") from None

    def header(self) -> dict[str, Any]:
        """What the file says around its events; empty where that is damaged."""
        inside = self._tail if self._tail.strip() else b"}"
        for text in (self._head + b"]" + inside, self._head + b"]}"):
            try:
                found = msgspec.json.decode(_without_infinities(text))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            return found if isinstance(found, dict) else {}
        return {}

    def _blocks(self, raw: IO[bytes]) -> Iterator[bytes]:
        """The file in pieces, unpacked; all that can be unpacked of one that is cut off or damaged."""
        packed = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        try:
            for block in _unpacked(raw) if packed else iter(lambda: raw.read(BLOCK_BYTES), b""):
                self.bytes_read += len(block)
                yield block
        except _CutError as error:
            self.cut = f"its gzip stream is damaged or cut off ({error})"

    def _batches(self, file: IO[bytes]) -> Iterator[list[Event]]:
        blocks = self._blocks(file)
        rest = self._find_events(blocks)
        for block in blocks:
            if self._tail:
                self._tail += block
                continue
            rest += block
            events, rest = self._decode(rest)
            if events:
                yield events
        if not self._tail:
            events, rest = self._decode(rest, last=True)
            if events:
                yield events
            if not self._tail and self.cut is None:
                self.cut = "the JSON is cut off"

    def _find_events(self, blocks: Iterator[bytes]) -> bytes:
        """Read up to where the events begin; what of them was read with it."""
        head = b""
        for block in blocks:
            head += block
            if head.lstrip()[:1] == b"[":
                begin = head.index(b"[") + 1
                self._head = b'{"traceEvents": ['
                return head[begin:]
            if found := _BEGIN.search(head):
                self._head = head[: found.end()]
                return head[found.end() :]
            if len(head) > LARGEST_HEAD_BYTES or head.lstrip()[:1] != b"{":
                break
        raise FormatError(
            f"{self.path}: {_what_it_is(head)}; expected a trace of torch.profiler (JSON, may be gzipped)"
        )

    def _decode(self, text: bytes, *, last: bool = False) -> tuple[list[Event], bytes]:
        """The whole events at the beginning of `text`, and the rest of it."""
        end, cut = _last_boundary(text)
        if cut >= 0:
            events = _decoded_list(text, end)
            if events is not None and not last:
                return events, text[cut:]
            if events is not None:
                more, rest = self._decode_each(text[cut:], last=True)
                return [*events, *more], rest
        elif not last and len(text) <= LARGEST_EVENT_BYTES:
            return [], text
        ends = [found.start() + 1 for found in _END.finditer(text)][:-_ENDS_TRIED:-1]
        for end in ends:
            events = _decoded_list(text, end)
            if events is not None:
                return events, self._finish(text[text.index(b"]", end) + 1 :])
        return self._decode_each(text, last=last or cut < 0)

    def _decode_each(self, text: bytes, *, last: bool) -> tuple[list[Event], bytes]:
        """One event after the other, for blocks in which some event is damaged or nested, and for the last block."""
        events: list[Event] = []
        ends = [found.start() + 1 for found in _BOUNDARY.finditer(text)]
        begins = [0, *(found.end() for found in _BOUNDARY.finditer(text))]
        at = 0
        while at < len(ends):
            piece = text[begins[at] : ends[at]]
            event, through = _decoded(piece), at
            while (
                event is None and through + 1 < min(len(ends), at + 8) and not _starts_event(text, begins[through + 1])
            ):
                through += 1
                event = _decoded(text[begins[at] : ends[through]])
            if event is None and (end := self._end_of_events(piece)) is not None:
                return [*events, *end[0]], self._finish(end[1] + text[ends[at] :])
            event = event or _decoded(_repaired(piece))
            if event is None:
                self.lost += 1
                through = at
            else:
                events.append(event)
            at = through + 1
        rest = text[begins[len(ends)] :]
        end = self._end_of_events(rest)
        if end is not None:
            return [*events, *end[0]], self._finish(end[1])
        if last:
            event = _decoded(rest.rstrip().rstrip(b",]")) if rest.strip() else None
            if event is not None:
                events.append(event)
            elif rest.strip():
                self.lost += 1
            rest = b""
        return events, rest

    def _end_of_events(self, piece: bytes) -> tuple[list[Event], bytes] | None:
        """The last event and what follows the list of events, where `piece` holds its end."""
        if piece.lstrip()[:1] == b"]":
            return [], piece.lstrip()[1:] or b" "
        for found in _END.finditer(piece):
            text = piece[: found.start() + 1]
            event = _decoded(text) or _decoded(_repaired(text))
            if event is not None:
                return [event], piece[found.end() :] or b" "
        return None

    def _finish(self, tail: bytes) -> bytes:
        self._tail = tail or b" "
        return b""


class _CutError(Exception):
    """A gzip stream ends too early, or what it holds is damaged."""


def _unpacked(raw: IO[bytes]) -> Iterator[bytes]:
    """A gzip file of any number of members, unpacked piece by piece. Raises _CutError behind what is whole."""
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


def _last_boundary(text: bytes) -> tuple[int, int]:
    """Where the last event but one of `text` ends and the last, which may go on, begins; -1 where there is none."""
    at = len(text)
    while (at := text.rfind(b"{", 0, at)) > 0:
        before = text[max(0, at - 64) : at].rstrip()
        if before.endswith(b",") and (ended := before[:-1].rstrip()).endswith(b"}"):
            return max(0, at - 64) + len(ended), at
    return -1, -1


def _starts_event(text: bytes, at: int) -> bool:
    """Whether an object has a key that events begin with."""
    return re.match(rb'\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id)"', text[at : at + 80]) is not None


def _decoded_list(text: bytes, end: int) -> list[Event] | None:
    """The events up to `end`."""
    try:
        return _EVENTS.decode(b"".join((b"[", memoryview(text)[:end], b"]")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _decoded(text: bytes) -> Event | None:
    try:
        return _EVENT.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _repaired(text: bytes) -> bytes:
    """`text` without what writers of such files get wrong: infinities, unescaped quotes, bytes that are no text."""
    text = _without_infinities(text.decode("utf-8", "replace").encode())
    return _STRING_VALUE.sub(lambda found: found[1] + _BARE_QUOTE.sub(rb"\\" + b'"', found[2]) + found[3], text)


def _without_infinities(text: bytes) -> bytes:
    return _NOT_FINITE.sub(rb"\1null", text)


def _what_it_is(head: bytes) -> str:
    """What a file that is no trace looks like."""
    start = head[:4096]
    if not head.strip():
        return "empty"
    if start.startswith(b"\x80") or b'"device_traces"' in start or b'"segments"' in start:
        return "a memory snapshot, not a trace; record one with torch.profiler.profile"
    return "no JSON with traceEvents"
