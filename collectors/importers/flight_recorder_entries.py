"""One flight-recorder dump: bytes of unknown origin in; checked entries, in the order of issue, out.

A dump is a pickle (PyTorch's own) or JSON, possibly gzipped. Neither may run code or exhaust memory. An entry with an
impossible value is left out and listed; the rank is then in doubt, unless the entry adds nothing: it may have done what
the entry would have shown.
"""

from __future__ import annotations

import bisect
import contextlib
import gzip
import io
import itertools
import json
import math
import re
import resource
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracekit.base.text import quoted, short
from tracekit.collectors.record.small_file import DAMAGE, RefusedPickleError, load_plain

#: More records than any recorder's ring buffer holds.
MOST_RECORDS = 1 << 22
#: No tensor has more elements.
MOST_ELEMENTS = 1 << 50
#: Nor more dimensions: PyTorch allows 64.
MOST_DIMENSIONS = 64
_STATES = ("scheduled", "started", "completed")
_TRANSFER = re.compile(r"(?:^|:)(?:send|recv|isend|irecv)\s+\d+\s*(?:->|<-)\s*\d+")
#: Recorders write `backend:operation`.
_NAME = re.compile(r"\w+:\s*\w")
COALESCED = "coalesced"


class ImpossibleError(ValueError):
    """An entry holds a value that no recorder writes; the message is a clause about it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded operation. `sequence` counts collectives or transfers of its group; `pg_id` is negative in transfers
    that `hang_watch` adds; `raw`: the rest, unchecked.
    """

    record: int
    pg_id: int
    group: tuple[str, str]
    p2p: bool
    sequence: int
    name: str
    finished: bool
    started: bool
    created_ns: int | None
    raw: Mapping[str, Any]

    @property
    def counted(self) -> tuple[int, bool]:
        """The counter of its sequence number: the group, and whether it counts transfers or collectives."""
        return self.pg_id, self.p2p


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of one dump. `left_out`: a clause per entry that is not used, or not in full. `restarted`: groups began
    to count again, and only their last life is here. `doubts`: why `entries` may lack ops or their order.
    """

    entries: list[Entry]
    left_out: list[str]
    restarted: bool
    doubts: list[str]


def checked_entries(listed: Sequence[Any]) -> Entries:
    """Every usable entry once, ordered by its record."""
    usable: dict[int, Entry] = {}
    left_out: list[str] = []
    lost: list[Any] = []

    def leave_out(raw: Any, why: str) -> None:
        name = raw.get("record_id") if isinstance(raw, dict) else None
        left_out.append(f"entry {quoted(name, 20)}: {why}")
        lost.append(raw)

    for raw in listed:
        try:
            entry = _entry(raw)
        except ImpossibleError as error:
            leave_out(raw, str(error))
            continue
        other = usable.setdefault(entry.record, entry)
        if other.raw != entry.raw:
            leave_out(raw, "another entry has the same record_id")
    ordered = [usable[record] for record in sorted(usable)]
    for check in (_far_records, _unlike_groups, _jumps, _lone_restarts):
        odd = check(ordered)
        for entry in ordered:
            if entry.record in odd:
                leave_out(entry.raw, odd[entry.record])
        ordered = [entry for entry in ordered if entry.record not in odd]
    begins = _last_lives(ordered)
    last_life = [entry for entry in ordered if entry.record >= begins.get(entry.pg_id, 0)]
    doubts = (
        ["what is left out may be the last that it did"] if not all(_is_past(raw, last_life) for raw in lost) else []
    )
    if gaps := _gaps(last_life, lost):
        missing = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in gaps[:3])
        left_out.append(f"without record {missing}{', ...' * (len(gaps) > 3)}")
        doubts.append("what is missing may be the last that it did")
    if not _in_time(last_life):
        doubts.append("times of unfinished entries contradict their record_id")
    if _repeated(last_life):
        doubts.append("entries repeat a sequence number")
    if not _are_lives(ordered, begins):
        doubts.append("one entry alone counts differently")
    return Entries(last_life, [*left_out, *_unstated(last_life)], len(last_life) < len(ordered), doubts)


def _gaps(used: list[Entry], lost: list[Any]) -> list[tuple[int, int]]:
    """The first and last of each run of records that are missing: a ring buffer holds neighbours. None in a dump of
    unfinished operations alone, which leaves the others out.
    """
    if not any(entry.finished for entry in used):
        return []
    left_out = {whole_number(raw.get("record_id")) for raw in lost if isinstance(raw, dict)}
    pairs = itertools.pairwise(entry.record for entry in used)
    return [
        (before + 1, after - 1)
        for before, after in pairs
        if after - before > 1 and not left_out.intersection(range(before + 1, after))
    ]


def _unstated(used: list[Entry]) -> list[str]:
    """Return clauses on entries that lack the tensor facts that others have: their calls are not compared."""
    clauses = []
    for name, stated in (("input_sizes", elements), ("input_dtypes", first_dtype)):
        missing = [entry for entry in used if not entry.p2p and not stated(entry.raw.get(name))]
        if len(missing) < len(used) or any(entry.raw.get(name) not in (None, [], ()) for entry in missing):
            clauses += [
                f"entry {entry.record}: {name} is {quoted(entry.raw.get(name))}, not compared" for entry in missing
            ]
    return clauses


def _entry(raw: Any) -> Entry:
    """Check one entry. Raises ImpossibleError."""
    if not isinstance(raw, dict):
        raise ImpossibleError("not a table of values")
    name = raw.get("profiling_name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise ImpossibleError(f"profiling_name is {quoted(name)}")
    p2p = _flag(raw, "is_p2p", missing=_TRANSFER.search(name) is not None)
    if p2p != (_TRANSFER.search(name) is not None) and COALESCED not in name:
        raise ImpossibleError(f"is_p2p is {quoted(raw.get('is_p2p'))} in {quoted(name)}")
    finished, started = _progress(raw)
    return Entry(
        record=_count(raw, "record_id"),
        pg_id=_count(raw, "pg_id", least=-MOST_RECORDS if p2p else 0),
        group=_group_name(raw.get("process_group")),
        p2p=p2p,
        sequence=_count(raw, "p2p_seq_id" if p2p else "collective_seq_id"),
        name=name,
        finished=finished or (name.startswith("gloo:") and _flag(raw, "retired", missing=False)),
        started=started,
        created_ns=whole_number(raw.get("time_created_ns")),
        raw=raw,
    )


def whole_number(value: Any) -> int | None:
    """Parse a non-negative 64-bit integer, also from text or a float without a fraction; None for anything else."""
    if isinstance(value, str):
        value = int(value) if value.isdecimal() and value.isascii() and len(value) < 20 else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < 1 << 63 else None


def _count(raw: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    value = raw.get(name)
    number = whole_number(value)
    if number is None and type(value) is int and least <= value < 0:
        return value
    if number is None:
        raise ImpossibleError(f"{name} is {quoted(value)}")
    return number


def _flag(raw: Mapping[str, Any], name: str, *, missing: bool) -> bool:
    value = raw.get(name, missing)
    if value not in (0, 1):
        raise ImpossibleError(f"{name} is {quoted(value)}")
    return bool(value)


def _progress(raw: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return (finished, started). NCCL's entries have a state, which follows from two times that the recorder writes
    from version 2.2 on; they also retire when they time out. gloo's only retire.
    """
    state = raw.get("state")
    if state not in _STATES:
        raise ImpossibleError(f"state is {quoted(state)}")
    for name, states in (("time_discovered_completed_ns", _STATES[2:]), ("time_discovered_started_ns", _STATES[1:])):
        value = raw.get(name)
        if value is not None and (whole_number(value) is None or (whole_number(value) and state not in states)):
            raise ImpossibleError(f"{name} is {quoted(value)} and state {state}")
    return state == "completed", state == "started"


def _group_name(stated: Any) -> tuple[str, str]:
    if isinstance(stated, str):
        return stated, ""
    if isinstance(stated, tuple | list) and len(stated) > 1 and all(isinstance(part, str) for part in stated[:2]):
        return stated[0], stated[1]
    raise ImpossibleError(f"process_group is {quoted(stated)}")


def _repeated(used: list[Entry]) -> bool:
    """True if operations share a number without being parts of one coalesced call."""
    numbers: dict[tuple[int, bool, int], list[Entry]] = defaultdict(list)
    for entry in used:
        if entry.pg_id >= 0:
            numbers[*entry.counted, entry.sequence].append(entry)
    return any(len(alike) > 1 and not any(COALESCED in entry.name for entry in alike) for alike in numbers.values())


def _far_records(ordered: list[Entry]) -> dict[int, str]:
    """Map records to what is impossible about them: a ring buffer holds neighbouring records."""
    middle = ordered[len(ordered) // 2].record if ordered else 0
    far = (entry.record for entry in ordered if abs(entry.record - middle) > MOST_RECORDS)
    return dict.fromkeys(far, f"record_id is far from those of the others, such as {middle}")


def _unlike_groups(ordered: list[Entry]) -> dict[int, str]:
    """Find groups with several names or numbers: within a process, a group has one of each."""
    pairs = Counter((entry.pg_id, entry.group) for entry in ordered if entry.pg_id >= 0)
    numbers, names = Counter[int](), Counter[tuple[str, str]]()
    for (number, name), count in pairs.items():
        numbers[number] += count
        names[name] += count
    return {
        entry.record: f"pg_id is {entry.pg_id} and process_group {quoted(entry.group)}, unlike in other entries"
        for entry in ordered
        if entry.pg_id >= 0 and 2 * pairs[entry.pg_id, entry.group] <= max(numbers[entry.pg_id], names[entry.group])
    }


def _jumps(ordered: list[Entry]) -> dict[int, str]:
    """Find impossible sequence numbers: each operation has a record, so they cannot rise faster than record numbers."""
    lanes: dict[tuple[int, bool], list[Entry]] = defaultdict(list)
    for entry in ordered:
        if entry.pg_id >= 0:
            lanes[entry.counted].append(entry)
    jumps = {}
    for (_, p2p), lane in lanes.items():
        steady = {entry.record for entry in _lives(lane)}
        field = "p2p_seq_id" if p2p else "collective_seq_id"
        for entry in lane:
            if entry.record not in steady:
                jumps[entry.record] = f"{field} is {entry.sequence}, which its neighbours do not allow"
    return jumps


def _lives(lane: list[Entry]) -> list[Entry]:
    """Return the entries of one counter that are consistent with each other. A life is a run of such entries; after a
    restart within the process, another one with lower numbers begins.
    """
    if not lane:
        return []
    life = _longest_run(lane)
    before = _lives([entry for entry in lane if entry.record < life[0].record])
    after = _lives([entry for entry in lane if entry.record > life[-1].record])
    if before and before[-1].sequence <= life[0].sequence:
        before = []
    if after and after[0].sequence >= life[-1].sequence:
        after = []
    return [*before, *life, *after]


def _longest_run(lane: list[Entry]) -> list[Entry]:
    """Return the longest run in which sequence numbers neither fall nor rise faster than records: the longest chain of
    entries in which both the number and its distance from the record grow.
    """
    ends: list[int] = []
    last: list[Entry] = []
    before: dict[int, Entry | None] = {}
    link: Entry | None = None
    for entry in sorted(lane, key=lambda entry: (entry.sequence, entry.record)):
        distance = entry.record - entry.sequence
        place = bisect.bisect_right(ends, distance)
        before[entry.record] = last[place - 1] if place else None
        if place == len(ends):
            link = entry  # of runs of equal length, the one with the lower numbers
        ends[place : place + 1], last[place : place + 1] = [distance], [entry]
    run: list[Entry] = []
    while link is not None:
        run.append(link)
        link = before[link.record]
    return run[::-1]


def _lone_restarts(ordered: list[Entry]) -> dict[int, str]:
    """Find restarts of single groups. A restart affects all groups: none continues to count across it."""
    begins = _last_lives(ordered)
    spans: dict[int, list[int]] = {}
    for entry in ordered:
        if not entry.p2p and entry.pg_id not in begins:
            spans.setdefault(entry.pg_id, [entry.record, entry.record])[1] = entry.record
    lone = {group for group, record in begins.items() if any(first < record <= last for first, last in spans.values())}
    return {
        entry.record: f"collective_seq_id is {entry.sequence}, as after a restart, but other groups count on"
        for entry in ordered
        if entry.pg_id in lone and not entry.p2p and entry.record >= begins[entry.pg_id]
    }


def _last_lives(ordered: list[Entry]) -> dict[int, int]:
    """Map groups to the record at which their numbers last restart."""
    begins: dict[int, int] = {}
    last: dict[int, int] = {}
    for entry in ordered:
        if not entry.p2p:
            if entry.sequence < last.get(entry.pg_id, 0):
                begins[entry.pg_id] = entry.record
            last[entry.pg_id] = entry.sequence
    return begins


def _are_lives(ordered: list[Entry], begins: Mapping[int, int]) -> bool:
    """True if every restart has two entries on either side; a single entry can also be damaged."""
    sides = Counter((entry.pg_id, entry.record < begins.get(entry.pg_id, 0)) for entry in ordered if not entry.p2p)
    return all(sides[group, earlier] > 1 for group in begins for earlier in (False, True))


def _is_past(raw: Any, used: list[Entry]) -> bool:
    """True if an entry can be left out without loss: it is finished, and later entries of the same group are
    present.
    """
    if not isinstance(raw, dict) or raw.get("state") != "completed":
        return False
    record, group, p2p = whole_number(raw.get("record_id")), whole_number(raw.get("pg_id")), raw.get("is_p2p", False)
    if record is None or group is None:
        return False
    return any(entry.record > record and entry.counted == (group, p2p) for entry in used)


def _in_time(used: list[Entry]) -> bool:
    """True if unfinished operations were recorded in the order of their records."""
    times = [entry.created_ns for entry in used if not entry.finished and entry.created_ns]
    return all(before <= after for before, after in itertools.pairwise(times))


def elements(sizes: Any) -> int | None:
    """Return the number of elements of tensors with these sizes; None if no tensor can have such a size."""
    if not isinstance(sizes, list | tuple) or not all(isinstance(size, list | tuple) for size in sizes):
        return None
    count = 0
    for size in sizes:
        sides = [whole_number(side) for side in size]
        count += math.prod(
            MOST_ELEMENTS + 1 if side is None else min(side, MOST_ELEMENTS + 1) for side in sides[:MOST_DIMENSIONS]
        )
    return count if count <= MOST_ELEMENTS else None


def first_dtype(dtypes: Any) -> str | None:
    """Return the type of the first tensor; None if none is stated."""
    stated = dtypes[0] if isinstance(dtypes, list | tuple) and dtypes else None
    return short(stated) if isinstance(stated, str) and stated else None


#: No dump is larger, bytes: 20,000 entries with stacks take about 40 MB.
LARGEST_FILE = 256 << 20
#: Maximum memory that reading may allocate, bytes.
LARGEST_GROWTH = 2 << 30
_PICKLE, _JSON, _GZIP = b"\x80", b"{", b"\x1f\x8b"
_VERSION = re.compile(r"2\.(\d+)$")
_READ_VERSIONS = range(1, 11)


class UnreadableError(Exception):
    """The file is not a usable dump; the message is a clause that follows the file's name."""


def read_dump(path: Path) -> dict[str, Any]:
    """Read one dump: a dictionary with a list of `entries`, versions 2.1 to 2.10 and later ones of 2.

    Raises UnreadableError if the file is torn, empty, too large, of another format, or would run code.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise UnreadableError(f"is {size / 1e9:.1f} GB; the limit for a dump is {LARGEST_FILE / 1e9:.1f} GB")
        content = path.read_bytes()
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from None
    if not content:
        raise UnreadableError("is empty")
    return _checked(_decoded(_unpacked(content) if content.startswith(_GZIP) else content))


def _unpacked(content: bytes) -> bytes:
    """The content of a gzip file, up to the limit for a dump."""
    try:
        with gzip.open(io.BytesIO(content)) as file:
            unpacked = file.read(LARGEST_FILE + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableError(f"is torn or damaged ({type(error).__name__}: {str(error)[:80]})") from None
    if len(unpacked) > LARGEST_FILE:
        raise UnreadableError(f"unpacks to more than {LARGEST_FILE / 1e9:.1f} GB, the limit for a dump")
    return unpacked


def _decoded(content: bytes) -> Any:
    try:
        if content.startswith(_PICKLE):
            return load_plain(content)
        if content.lstrip().startswith(_JSON):
            return json.loads(content)
    except RefusedPickleError as error:
        raise UnreadableError(str(error)) from None
    except MemoryError:
        raise UnreadableError("refused: it asks for more memory than a dump needs") from None
    except DAMAGE as error:
        raise UnreadableError(f"is torn or damaged ({type(error).__name__}: {str(error)[:80]})") from None
    raise UnreadableError("is neither a pickle nor a JSON object")


def _checked(dump: Any) -> dict[str, Any]:
    if not isinstance(dump, dict) or not isinstance(dump.get("version"), str):
        raise UnreadableError("is not a flight-recorder dump: it has no version")
    if _VERSION.match(dump["version"]) is None:
        raise UnreadableError(f"has version {dump['version'][:20]!r}; tracekit reads 2.1 to 2.10")
    if not isinstance(dump.setdefault("entries", []), list):
        raise UnreadableError("is not a flight-recorder dump: its entries are not a list")
    return dump


def is_newer(version: str) -> bool:
    """True if this version is newer than the newest known one."""
    match = _VERSION.match(version)
    return match is not None and int(match.group(1)) not in _READ_VERSIONS


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the process grow by `LARGEST_GROWTH` at most: a pickle of twenty bytes can request any amount."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    limit = held + LARGEST_GROWTH
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
