"""Read the files of ranks while they are being written, or afterwards.

In: the directory of an attempt, read repeatedly. Out: new data of each rank and, for a range of steps, an
`AttemptRecording` of them. Delivered steps are dropped, so that memory holds only unfinished steps, however long the
run. A rank that writes garbage is left out from there on, with one line that says so, until its records have been in
order for a window. One that cannot be read is retried for some time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tracekit.base.contained import Contained
from tracekit.base.errors import FormatError, UnsafeFileError
from tracekit.base.stderr import advance
from tracekit.collectors.record.small_file import open_to_read
from tracekit.collectors.record.wire_format import (
    HEADER,
    LEFT_OVER_SEGMENT,
    OPEN_SUFFIX,
    RECORD,
    SEALED_SUFFIX,
    attempt_directory,
)
from tracekit.collectors.run_directory.followed_rank import FactParser, FileRead, FollowedRank, Notice, Trouble
from tracekit.collectors.run_directory.launchers import MANIFEST, RANK_FILE, why_unrecorded
from tracekit.collectors.run_directory.segments import AttemptRecording, GarbageError, joined, records_in

#: A rank whose files cannot be read is retried after growing delays, and left out after this long, seconds.
READ_RETRY_S = 300.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 10.0


class _FileName(NamedTuple):
    """Parts of a file name. `rank`: -1 if it is no rank's. `number`: of a segment, -1 for facts. `key`: the same before
    and after sealing.
    """

    rank: int
    number: int
    key: str

    @classmethod
    def of(cls, name: str) -> _FileName:
        match = RANK_FILE.match(name)
        if match is None:
            return cls(-1, -1, name)
        return cls(int(match[1]), int(match[2] or -1), name if match[2] is None else Path(name).stem)


@dataclass(slots=True)
class AttemptFollower:
    """Follows the ranks of the attempt in `directory`, from step `origin` on.

    `over`: the attempt has ended, and one look reads it. `first`: the first step not delivered yet. `grew`: ranks wrote
    something since the last look.
    """

    attempt: int
    directory: Path
    origin: int
    over: bool = False
    first: int = -1
    ranks: dict[int, FollowedRank] = field(default_factory=dict)
    grew: bool = False
    _files: dict[str, FileRead] = field(default_factory=dict)
    _names: dict[str, _FileName] = field(default_factory=dict)
    _parser: FactParser = field(default_factory=FactParser)

    def __post_init__(self) -> None:
        self.first = max(self.first, self.origin)

    def update(self, now_s: float, *, at_end: bool = False) -> list[Notice]:
        """Read new data at `now_s`, seconds on any steady clock. Returns a notice for each rank with a problem. Raises
        OSError if the directory cannot be read.

        `at_end`: nothing follows.
        """
        notices = []
        self.grew = False
        listed = self._listed()
        for number, (entry, file) in enumerate(listed):
            if self.over:
                advance("reading what the ranks recorded", number, len(listed), "files")
            if (rank := self.ranks.get(file.rank)) is None:
                rank = self.ranks[file.rank] = FollowedRank(file.rank, self.over)
            if rank.bad is not None or (rank.trouble is not None and now_s < rank.trouble.again_s):
                continue
            try:
                notices += self._read_on(entry, file, rank)
            except OSError as error:
                why = f"{entry.path}: cannot be read: {error.strerror or error}"
                if self.over:
                    notices.append(self._left_out(rank, f"{why}; copy it again"))
                # One that is missing was sealed under another name since: the next look finds it.
                elif not isinstance(error, FileNotFoundError):
                    notices += self._put_off(rank, why, now_s)
            except FormatError as error:
                notices.append(self._left_out(rank, error))
        notices += self._recovered(now_s)
        for rank in [rank for rank in self.ranks.values() if rank.bad is None and rank.holds_back]:
            try:
                rank.settle(self.good.values(), self.origin, self.first, at_end=at_end)
            except FormatError as error:
                notices.append(self._left_out(rank, error))
        return notices

    def _listed(self) -> list[tuple[os.DirEntry[str], _FileName]]:
        """The files of ranks, facts first because records refer to them; the main cost of following an idle job."""
        with os.scandir(self.directory) as entries:
            entry_of = {entry.name: entry for entry in entries}
        self._names = {name: self._names.get(name) or _FileName.of(name) for name in entry_of}
        files = [(entry_of[name], file) for name, file in self._names.items() if file.rank >= 0]
        return sorted(files, key=lambda item: item[1])

    def _left_out(self, rank: FollowedRank, why: str | FormatError) -> Notice:
        rank.leave_out(str(why), can_pass=isinstance(why, GarbageError))
        return Notice(f"rank {rank.rank} is left out from step {self.first} on: {why}", left_out=True)

    def _put_off(self, rank: FollowedRank, why: str, now_s: float) -> Iterator[Notice]:
        """Schedule a retry: a shared folder fails now and then, and recovers."""
        trouble = rank.trouble
        if trouble is None:
            rank.trouble = Trouble(now_s, now_s + _FIRST_RETRY_S, _FIRST_RETRY_S)
            yield Notice(f"rank {rank.rank}: {why}; trying again for {READ_RETRY_S:.0f} s")
        elif now_s - trouble.since_s >= READ_RETRY_S:
            yield self._left_out(rank, f"{why} for {READ_RETRY_S:.0f} s")
        elif now_s >= trouble.again_s:
            trouble.wait_s = min(2 * trouble.wait_s, _LONGEST_RETRY_S)
            trouble.again_s = now_s + trouble.wait_s

    def _recovered(self, now_s: float) -> Iterator[Notice]:
        for rank in self.ranks.values():
            if rank.trouble is not None and rank.bad is None and now_s >= rank.trouble.again_s:
                rank.trouble = None
                yield Notice(f"rank {rank.rank} can be read again")

    def _read_on(self, entry: os.DirEntry[str], name: _FileName, rank: FollowedRank) -> list[Notice]:
        if (progress := self._files.get(name.key)) is None:
            progress = self._files[name.key] = FileRead(0)
        if entry.stat().st_size <= progress.read:
            return []
        with open_to_read(entry.path) as file:
            file.seek(progress.read)
            content = file.read()
        if name.number < 0:
            progress.read += len(content)
            self.grew = True
            return rank.add_facts(content, Path(entry.path), progress, self._parser)
        head = HEADER.size if progress.read == 0 else 0
        if len(content) < head:
            return []
        records = records_in(content, entry.path, has_header=head > 0)
        # A shared folder can show zeros in place of bytes that have not arrived yet; no record has the number 0.
        absent = records["number"] == 0
        if absent.any():
            records = records[~absent] if self.over else records[: int(absent.argmax())]
        progress.read += head + len(records) * RECORD.size
        self.grew = self.grew or len(records) > 0
        progress.newest_step = max(progress.newest_step, int(records["step"].max(initial=-1)))
        rank.add_records(records, self.origin, self.first, left_over=name.number == LEFT_OVER_SEGMENT)
        return []

    @property
    def good(self) -> dict[int, FollowedRank]:
        """The ranks that have identified themselves and are not left out."""
        return {
            number: rank
            for number, rank in self.ranks.items()
            if rank.bad is None and not rank.on_trial and "process" in rank.facts
        }

    @property
    def world_size(self) -> int:
        """The number of ranks of the attempt according to most ranks seen; 0 while none has stated it.

        Of several equally frequent numbers, the one closest to the number of ranks that have written counts.
        """
        sizes = [int(rank.facts["process"][0]["world_size"]) for rank in self.good.values()]
        seen = len(self.ranks)
        return max(set(sizes), key=lambda size: (sizes.count(size), -abs(size - seen), size), default=0)

    def leave_out_strangers(self) -> list[Notice]:
        """Leave out ranks whose world size differs from that of most ranks: they belong to another job."""
        size, notices = self.world_size, []
        for rank in self.good.values():
            seen = int(rank.facts["process"][0]["world_size"])
            if seen != size:
                rank.leave_out(f"it saw {seen} ranks, the others {size}: segments of two jobs in one folder")
                notices.append(Notice(f"rank {rank.rank} is left out: {rank.bad}", left_out=True))
        return notices

    def leave_out(self, ranks: Collection[int], why: str) -> list[Notice]:
        """Leave out ranks that make a window impossible."""
        return [self._left_out(self.ranks[number], why) for number in ranks]

    def take(self, last: int) -> AttemptRecording:
        """Return the steps up to `last` of all ranks that recorded one of them whole; drop them from memory."""
        recordings = {}
        for number, rank in sorted(self.good.items()):
            any_whole = any(step <= last for step in rank.steps)
            records = rank.take(last)
            if any_whole:
                recordings[number] = rank.recording(records)
        self.first = last + 1
        return AttemptRecording(self.attempt, self.directory, recordings)

    def readmit(self) -> list[Notice]:
        """At the end of a window: read again the ranks that were left out for garbage, and deliver them once they have
        been in order for a whole window. One flipped bit costs a rank two windows, not the attempt.
        """
        notices = []
        for rank in self.ranks.values():
            if rank.on_trial and rank.whole >= self.first - 1:
                rank.take(self.first - 1)
                rank.on_trial = False
                notices.append(Notice(f"rank {rank.rank} is in order again; it is read from step {self.first} on"))
        returning = [rank for rank in self.ranks.values() if rank.bad is not None and rank.returns]
        returning = [rank for rank in returning if "process" in rank.facts]
        if returning:
            with suppress(OSError):  # at the end of the next window, then
                self._skip_to_the_end({rank.rank for rank in returning})
                for rank in returning:
                    rank.begin_again()
        return notices

    def _skip_to_the_end(self, ranks: Collection[int]) -> None:
        """Continue after the last whole record that these ranks have written."""
        for entry, name in self._listed():
            if name.rank in ranks and name.number >= 0:
                size = entry.stat().st_size
                progress = self._files.setdefault(name.key, FileRead(0))
                if size >= HEADER.size:
                    progress.read = size - (size - HEADER.size) % RECORD.size

    def remove_spent(self) -> None:
        """Remove the sealed segments whose records have all been delivered."""
        run = Contained(self.directory.parent)
        with suppress(UnsafeFileError):  # an attempt that is a link leads to files of others
            for name in run.files(self.directory.name):
                progress = self._files.get(name.removesuffix(SEALED_SUFFIX)) if name.endswith(SEALED_SUFFIX) else None
                if progress is None or progress.newest_step >= self.first:
                    continue
                status = run.status(path := f"{self.directory.name}/{name}")
                if status is not None and progress.read >= status.st_size:
                    run.remove(path)
                    del self._files[name.removesuffix(SEALED_SUFFIX)]


def read_attempt(directory: str | os.PathLike[str], attempt: int) -> AttemptRecording:
    """Read one attempt of a run directory that has ended. Raises FormatError if it holds no segments, or garbage alone.

    A torn tail is cut at the last whole record; the manifest, if the launcher lived to write one, lists the files.
    """
    path = attempt_directory(Path(directory), attempt)
    _check_complete(path)
    follower = AttemptFollower(attempt, path, 0, over=True)
    skipped = tuple(notice.line for notice in follower.update(0.0) if not notice.left_out)
    follower.leave_out_strangers()
    bad = {number: why for number, rank in sorted(follower.ranks.items()) if (why := rank.bad) is not None}
    if not follower.good:
        if bad:
            raise FormatError(bad[min(bad)])
        why = why_unrecorded(path.parent) or "check that the command trains with torch in this Python environment"
        raise FormatError(f"{path}: no rank recorded anything; {why}")
    ranks = {number: rank.recording(joined(rank.pending)) for number, rank in sorted(follower.good.items())}
    left_out = tuple(f"rank {number} is left out: {why}; the other ranks are read" for number, why in bad.items())
    return AttemptRecording(attempt, path, ranks, (*left_out, *skipped))


def _check_complete(path: Path) -> None:
    """Raise FormatError unless all files of the manifest are complete: a folder may have been copied partially."""
    manifest = path / MANIFEST
    if not manifest.exists():
        return
    sizes = {entry.name: entry.stat().st_size for entry in path.iterdir() if RANK_FILE.match(entry.name)}
    try:
        with open_to_read(manifest) as file:
            listed = {str(name): int(size) for name, size in json.load(file)["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{manifest}: damaged ({error!r:.200}); delete it to read the files that are there") from None
    for name, size in listed.items():
        sealed = name.replace(OPEN_SUFFIX, SEALED_SUFFIX)  # a rank that outlived the launcher
        if max(sizes.get(name, -1), sizes.get(sealed, -1)) < size:
            raise FormatError(f"{path / name}: missing, or shorter than the {size} bytes it had; copy it again")
