"""Records and facts of the ranks of a collected run, per attempt and rank, without impossible records; clocks of hosts.

In: what ranks wrote, and the pings between launchers. Out: an `AttemptRecording`, and a `ClockFit` per host, a line
fitted to the measurements of its launcher, which is applied when segments are merged. Ranks of one host share its
monotonic clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracekit.base.errors import FormatError
from tracekit.collectors.record.small_file import open_to_read, read_small
from tracekit.collectors.record.wire_format import HEADER, MAGIC, RECORD, VERSION, Category, Flag
from tracekit.collectors.run_directory.launchers import RUN_FILE, RUN_FILE_BYTES, ClockSample

#: `RECORD` as a numpy type.
RECORD_DTYPE = np.dtype(
    [
        ("category", "<u1"),
        ("flags", "<u1"),
        ("name", "<u2"),
        ("step", "<i4"),
        ("microbatch", "<i4"),
        ("chunk", "<i4"),
        ("peer", "<i4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("extra", "<i8"),
        ("number", "<i8"),
    ]
)
#: Whether a category of records is valid, [256]; 0 marks a record that was never written.
_IS_CATEGORY = np.isin(np.arange(256), (0, *map(int, Category)))
#: Steps are numbered in 32 bits.
_LARGEST_STEP = 1 << 31


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process among those of all hosts."""

    host: str
    number: int


@dataclass(frozen=True, slots=True)
class RankRecording:
    """One rank's data of one attempt."""

    rank: int
    records: npt.NDArray[np.void]
    names: dict[int, str]
    facts: dict[str, list[Any]]

    @property
    def world_size(self) -> int:
        """The number of ranks that this rank saw."""
        return int(self.facts["process"][0]["world_size"])

    @property
    def summary(self) -> dict[str, Any] | None:
        """Its counters, if the process lived to write them."""
        summaries = self.facts.get("summary")
        return summaries[-1] if summaries else None


@dataclass(frozen=True, slots=True)
class AttemptRecording:
    """All ranks of one attempt, by rank. `left_out`: a line for each rank, or fact, that is garbage."""

    attempt: int
    directory: Path
    ranks: dict[int, RankRecording]
    left_out: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks of the attempt."""
        return max(recording.world_size for recording in self.ranks.values())

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that wrote nothing."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)

    @property
    def program(self) -> tuple[str, ...]:
        """The arguments of the first rank's process, none if it did not tell them."""
        return tuple(self.ranks[min(self.ranks)].facts["process"][0].get("program") or ())

    @property
    def scheduler(self) -> dict[str, str]:
        """What the scheduler of the first rank's process says of the job, and the user's labels."""
        return dict(self.ranks[min(self.ranks)].facts["process"][0].get("scheduler") or {})

    def processes(self) -> dict[int, ProcessId]:
        """The process of each rank."""
        facts = {rank: segment.facts["process"][0] for rank, segment in self.ranks.items()}
        return {
            rank: ProcessId(str(fact["host"]), int(fact["process_id"]))
            for rank, fact in facts.items()
            if "process_id" in fact
        }


def joined(parts: Iterable[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """The records of all parts, read-only. `np.concatenate` would compare their types field by field for each part."""
    return np.frombuffer(b"".join(part.tobytes() for part in parts), RECORD_DTYPE)


def without_torn_steps(records: npt.NDArray[np.void], last: int = 0) -> npt.NDArray[np.void]:
    """Records, ordered by number, without the ends of steps that began in deleted records (`--keep`).

    `last`: the number of the record before the first. A step without its end is not whole, so the merge leaves it out.
    """
    if not len(records) or records["number"][-1] - last == len(records):  # the numbers rise, so none is missing
        return records
    gaps = np.flatnonzero(np.diff(records["number"], prepend=last) > 1)
    ends = np.flatnonzero(records["category"] == Category.STEP)
    torn = np.searchsorted(ends, gaps)
    return np.delete(records, ends[torn[torn < len(ends)]])


def records_in(content: bytes, path: Path | str, *, has_header: bool = True) -> npt.NDArray[np.void]:
    """The whole records in a segment, or in a part of one, which has no header. Raises FormatError if it is none."""
    start = HEADER.size if has_header else 0
    if has_header:
        magic, version, record_size, *_ = HEADER.unpack_from(content)
        if magic != MAGIC or version != VERSION or record_size != RECORD.size:
            raise FormatError(
                f"{path}: not a segment that this tracekit reads (version {version}); upgrade tracekit, or record again"
            )
    records = np.frombuffer(content, RECORD_DTYPE, (len(content) - start) // RECORD.size, start)
    unknown = ~_IS_CATEGORY[records["category"]]
    if unknown.any():
        row = int(unknown.argmax())
        raise GarbageError(
            f"{path}: damaged, record {row} has the unknown category {records['category'][row]}; copy it again, or"
            " record the run again"
        )
    return records


class LaunchedOptions(msgspec.Struct, frozen=True):
    """`first_step`: the first step that belongs in the trace. `stacks`: a watch may ask for stacks."""

    first_step: Annotated[int, msgspec.Meta(ge=0, lt=_LARGEST_STEP)]
    stacks: bool = False


#: A time of the wall clock.
_TimeNs = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class LaunchedRun(msgspec.Struct, frozen=True):
    """The launcher's file about a run. `started_ns`, `ended_ns`: of the command, by the wall clock; None if it does not
    say so.
    """

    command: tuple[str, ...]
    options: LaunchedOptions
    started_ns: _TimeNs | None = None
    ended_ns: _TimeNs | None = None


def read_run(directory: Path) -> LaunchedRun:
    """The run of a run directory. Raises FormatError if its file is damaged."""
    path = directory / RUN_FILE
    try:
        return msgspec.json.decode(read_small(path, RUN_FILE_BYTES), type=LaunchedRun)
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: damaged or unreadable ({error!s:.200}); record the run again") from None


def is_run_directory(path: str | os.PathLike[str]) -> bool:
    """True if a path is a run directory of `tracekit collect`."""
    return Path(path).is_dir() and (Path(path) / RUN_FILE).exists()


#: Looking a member up takes longer than comparing the records of a step with it.
_STEP, _DEVICE_CLOCK = int(Category.STEP), int(Flag.DEVICE_CLOCK)
#: A rank numbers its records from 1, and never makes this many.
_MOST_RECORDS = 1 << 48
#: Records are made as ops end. Even one that was held back is not this late, ns.
_FAR_NS = 600 * 1_000_000_000
#: A step begins when the one before it ends: their times are two readings of one clock, at most this far apart, ns.
_SAME_NS = 1_000_000
#: The step of a rank's next record is at most this many times as far away as its last two steps were apart.
_NEAR_STEPS = 16


class GarbageError(FormatError):
    """A record contradicts its neighbours, and no clock is to blame: later records may be valid."""


@dataclass(slots=True)
class Trail:
    """State after a rank's last record. `born_ns`: when its process began, by its own clock.

    `stride`: distance of its last two steps, since a script can number steps as it likes.
    """

    born_ns: int
    number: int = 0
    step: int = 0
    stride: int = 1
    ended_step: int | None = None
    end_ns: int | None = None
    newest_ns: int | None = None
    newest_device_ns: int | None = None

    @property
    def reach(self) -> int:
        """The largest distance to the step of the next record."""
        return _NEAR_STEPS * self.stride

    def check_numbers(self, records: npt.NDArray[np.void]) -> None:
        """Check that the numbers of records rise. Raises FormatError."""
        numbers = records["number"]
        ahead = np.concatenate([[self.number], numbers[:-1]])
        wrong = (numbers <= ahead) | (numbers > _MOST_RECORDS)
        if wrong.any():
            row = int(wrong.argmax())
            raise GarbageError(f"garbage: record {numbers[row]} follows record {ahead[row]}")
        self.number = int(numbers[-1])

    def check_times(self, records: npt.NDArray[np.void]) -> None:
        """Check that ops end after they begin, and about in the order of the records. Raises FormatError."""
        backwards = records["end_ns"] < records["start_ns"]
        if backwards.any():
            worst = records[backwards][0]
            raise _stepped(f"in step {worst['step']}", int(worst["end_ns"]) - int(worst["start_ns"]))
        on_device = records["flags"] & _DEVICE_CLOCK != 0
        self._check_steps(records[(records["category"] == _STEP) & ~on_device])
        host, device = records[~on_device], records[on_device]
        early = host["start_ns"] < self.born_ns - _FAR_NS
        if early.any():
            worst = host[early][0]
            raise _far(int(worst["step"]), int(worst["start_ns"]) - self.born_ns, "before its process began")
        self.newest_ns = _in_order(host, self.newest_ns)
        self.newest_device_ns = _in_order(device, self.newest_device_ns)

    def _check_steps(self, steps: npt.NDArray[np.void]) -> None:
        """Check that each step begins when the previous one ends."""
        for number, start_ns, end_ns in zip(
            steps["step"].tolist(), steps["start_ns"].tolist(), steps["end_ns"].tolist(), strict=True
        ):
            follows = self.ended_step is not None and number == self.ended_step + 1
            if follows and self.end_ns is not None and abs(start_ns - self.end_ns) > _SAME_NS:
                raise _stepped(f"between steps {self.ended_step} and {number}", start_ns - self.end_ns)
            self.ended_step, self.end_ns = number, end_ns

    def first_jump(self, records: npt.NDArray[np.void]) -> int | None:
        """The first row whose step is out of reach of the steps before it; None if there is none.

        The rows before it count. Raises FormatError for steps that go back.
        """
        steps = records["step"].astype(np.int64)
        newest = np.maximum.accumulate(np.concatenate([[self.step], steps]))
        ahead = newest[:-1]
        implausible = (steps < ahead - self.reach) | (steps < 0) | (steps > ahead + self.reach)
        row = int(implausible.argmax()) if implausible.any() else None
        if row is not None and steps[row] < ahead[row]:
            raise GarbageError(f"garbage: a record of step {steps[row]} follows one of step {ahead[row]}")
        ends = sorted(set(steps[:row][records["category"][:row] == _STEP].tolist()))
        if len(ends) > 1:
            self.stride = ends[-1] - ends[-2]
        self.step = int(newest[len(steps) if row is None else row])
        return row

    def jump(self, step: int) -> None:
        """Continue at `step`, as other ranks confirm."""
        self.step, self.stride = step, max(1, step - self.step)


def _in_order(records: npt.NDArray[np.void], newest_ns: int | None) -> int | None:
    """The newest end of the records. Raises FormatError if one ends long before an earlier one."""
    if not len(records):
        return newest_ns
    ends = records["end_ns"]
    newest = np.maximum.accumulate(ends)
    if newest_ns is not None:
        newest = np.maximum(newest, newest_ns)
    back = newest.astype(np.float64) - ends > _FAR_NS
    if back.any():
        row = int(back.argmax())
        raise _far(int(records["step"][row]), int(ends[row]) - int(newest[row]), "before an earlier record")
    return int(newest[-1])


def _stepped(where: str, by_ns: int) -> FormatError:
    way = "back" if by_ns < 0 else "forward"
    return FormatError(f"{where} its clock stepped {way} by {abs(by_ns) / 1e9:.3g} s")


def _far(step: int, by_ns: int, what: str) -> FormatError:
    return FormatError(f"garbage: an op of step {step} lies {abs(by_ns) / 1e9:.3g} s {what}, or its clock stepped back")


@dataclass(frozen=True, slots=True)
class ClockFit:
    """reference = local + `offset_ns` + `drift` x (local - `local_ns`).

    `uncertainty_ns`: half the shortest round trip plus the residual of the fit.
    """

    local_ns: int
    offset_ns: float
    drift: float
    uncertainty_ns: float
    samples: int

    def to_reference(self, local_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Times of this host on the reference clock, ns."""
        since = local_ns - self.local_ns
        return local_ns + np.round(self.offset_ns + self.drift * since).astype(np.int64)


#: Approximate length of a line in a file of samples, bytes.
_SAMPLE_BYTES = 100


def fit_clock(samples: Iterable[ClockSample]) -> ClockFit:
    """Offset and drift by least squares over the better half of the samples; a single one gives the offset only."""
    ordered = sorted(samples, key=lambda sample: sample.round_trip_ns)
    if not ordered:
        raise ValueError("no clock samples; expected at least one")
    best = ordered[: max(2, (len(ordered) + 1) // 2)]
    origin = min(sample.local_ns for sample in best)
    offset = np.array([sample.offset_ns for sample in best], np.float64)
    base = float(offset[0])
    since = np.array([sample.local_ns - origin for sample in best], np.float64)
    drift, intercept = np.polyfit(since, offset - base, 1) if np.ptp(since) > 0 else (0.0, 0.0)
    residual = offset - base - (intercept + drift * since)
    return ClockFit(
        local_ns=origin,
        offset_ns=base + float(intercept),
        drift=float(drift),
        uncertainty_ns=ordered[0].round_trip_ns / 2 + float(np.abs(residual).max()),
        samples=len(ordered),
    )


def read_clocks(directory: Path, newest: int | None = None) -> dict[str, ClockFit]:
    """The fit of each host with measurements, over all samples or about the `newest` ones. Raises FormatError if a file
    is damaged.
    """
    fits = {}
    for path in sorted(directory.glob("clock-*.samples")):
        try:
            samples = [msgspec.json.decode(line, type=ClockSample) for line in _lines(path, newest)]
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path}: damaged ({error}); delete it to merge without correcting this clock") from None
        if samples:
            fits[path.name.removeprefix("clock-").removesuffix(".samples")] = fit_clock(samples)
    return fits


def _lines(path: Path, newest: int | None) -> list[bytes]:
    """The whole lines at the end of a file, about `newest` of them, or all."""
    with open_to_read(path) as file:
        skipped = 0 if newest is None else max(0, os.fstat(file.fileno()).st_size - newest * _SAMPLE_BYTES)
        file.seek(skipped)
        lines = file.read().split(b"\n")
    return [line for line in lines[bool(skipped) :] if line]
