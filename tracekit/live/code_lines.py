"""Finds the line of code at which a slow rank spends its time and a healthy one does not.

In: an alarming cause of a window of a running job. Out: a request to the rank that it is on and to healthy peers to
sample where their training threads are (`collectors/record/hang_watch.py`), and, from their answers, a sentence for
the alert. A place where peers spend as much time is no answer, and a line that explains less than half of what the
cause costs is none either: then nothing is said.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from tracekit.base.errors import StoreError
from tracekit.base.text import code_name
from tracekit.collectors.record.small_file import MOST_DUMP_BYTES, read_small, write_whole
from tracekit.collectors.record.wire_format import STACK_REQUEST, STACK_SAMPLES_SUFFIX, StackRequest, rank_stem
from tracekit.report.conclusions import CauseInWords
from tracekit.report.findings import Findings, Unanalysed
from tracekit.report.report import Report
from tracekit.store import Store

#: Samples of each rank, the steps that they cover, and the longest time for them, seconds.
SAMPLES, STEPS = 200, 4
SHORTEST_S, LONGEST_S = 1.0, 30.0
#: How long to wait for answers after that, seconds: a shared disk shows new files late.
PATIENCE_S = 5.0
#: Healthy ranks to compare with: what one spends more than another is no finding.
PEERS = 2
#: Standard errors between two shares of samples that differ.
_APART = 4.0
#: The deepest line with this share of the largest excess is the one to name: its callers have all of it.
_MOST_OF_IT = 0.8
#: What paths of files that no user wrote contain or begin with.
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<")
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class _Line(NamedTuple):
    """A line of code: in how many samples it was on the stack, and how deep."""

    file: str
    number: _Count
    function: str
    hits: _Count
    depth: _Count

    @property
    def place(self) -> tuple[str, int, str]:
        return self.file, self.number, self.function


class StackSamples(msgspec.Struct, dict=True):
    """The answer of a rank to request `id`."""

    id: int
    samples: _Count
    steps: _Count
    lines: tuple[_Line, ...]

    def share_at(self, line: _Line) -> float:
        """The share of samples with that line on the stack."""
        return self._counts.get(line.place, 0) / self.samples

    def is_more_often_at(self, line: _Line, peer: StackSamples) -> bool:
        """Whether this rank is at a line more often than a peer, by more than chance explains."""
        share, other = self.share_at(line), peer.share_at(line)
        pooled = (share * self.samples + other * peer.samples) / (self.samples + peer.samples)
        return share - other > _APART * math.sqrt(pooled * (1 - pooled) * (1 / self.samples + 1 / peer.samples))

    @cached_property
    def _counts(self) -> dict[tuple[str, int, str], int]:
        return {line.place: line.hits for line in self.lines}


@dataclass(slots=True)
class LineQuestion:
    """A request under way: which line of code makes `rank` slower than `peers` by `share` of the step.

    `until_s`: when to wait no longer, on the steady clock.
    """

    attempt: Path
    id: int
    rank: int
    peers: tuple[int, ...]
    share: float
    until_s: float

    @classmethod
    def ask(cls, attempt: Path, cause: CauseInWords, report: Report, healthy: Collection[int]) -> LineQuestion | None:
        """Ask the ranks of the attempt in that folder; None if no rank can be asked. Raises OSError.

        `healthy`: the recorded ranks that no cause of the window is on.
        """
        if not cause.ranks or not healthy:
            return None
        rank = cause.ranks[0]
        peers = tuple(_nearest_peers(rank, healthy, report))
        seconds = min(max(STEPS * report.step_time_s.recorded, SHORTEST_S), LONGEST_S)
        request = StackRequest(time.time_ns(), (rank, *peers), SAMPLES, seconds)
        write_whole(attempt / STACK_REQUEST, msgspec.json.encode(asdict(request)))
        return cls(attempt, request.id, rank, peers, cause.share, time.monotonic() + seconds + PATIENCE_S)

    def answers(self) -> dict[int, StackSamples]:
        """The answers so far, by rank; skips other files."""
        answers = {}
        for rank in (self.rank, *self.peers):
            try:
                content = read_small(self.attempt / f"{rank_stem(rank)}{STACK_SAMPLES_SUFFIX}", MOST_DUMP_BYTES)
                answer = msgspec.json.decode(content, type=StackSamples)
            except (OSError, ValueError, RecursionError):
                continue
            if answer.id == self.id and answer.samples:
                answers[rank] = answer
        return answers

    def is_over(self, answers: Mapping[int, StackSamples], now_s: float) -> bool:
        """Whether all have answered, or are not waited for any longer."""
        return now_s >= self.until_s or answers.keys() >= {self.rank, *self.peers}

    def words(self, answers: Mapping[int, StackSamples]) -> str | None:
        """The line in which the rank differs from every peer that answered; None if there is none."""
        slow, peers = answers.get(self.rank), {rank: answers[rank] for rank in self.peers if rank in answers}
        if slow is None or not peers:
            return None
        line = _line_apart(slow, list(peers.values()), self.share)
        if line is None:
            return None
        name = code_name(f"{line.file}({line.number}): {line.function}")
        others = ", ".join(f"rank {rank} in {samples.share_at(line):.0%}" for rank, samples in peers.items())
        return f"rank {self.rank} is at {name} in {slow.share_at(line):.0%} of samples, {others}"


class LineAsker:
    """Asks for the line of code of a cause that is about to open an incident of a job; one question at a time.

    `log`: called with a line for the user.
    """

    def __init__(self, store: Store, job: str, log: Callable[[str], None]) -> None:
        self._store, self._job, self._log = store, job, log
        self._question: LineQuestion | None = None
        self._answers: dict[int, StackSamples] = {}
        self._off = False

    def ask(self, findings: Findings, attempt: Path, ranks: Collection[int]) -> None:
        """Ask the ranks of the attempt in that folder, if the findings of a window are about to open an incident."""
        alarming = [cause for cause in findings.report.alarming if cause.ranks]
        if not alarming or self._off:
            return
        healthy = set(ranks).difference(*(cause.ranks for cause in findings.report.answer.accounts))
        try:
            before = self._store.incidents(self._job, only_open=True)
            new = [cause for cause in alarming if not any(incident.shows_in(cause) for incident in before)]
            self._question = LineQuestion.ask(attempt, new[0], findings.report, healthy) if new else None
        except (OSError, StoreError) as error:
            self._off = True
            self._log(f"ranks are not asked for lines of code: {error}")

    def waits(self, *, at_end: bool = False) -> bool:
        """Whether answers are still missing. `at_end`: the job has ended, so no more answers come."""
        if self._question is None:
            return False
        self._answers = self._question.answers()
        return not (at_end or self._question.is_over(self._answers, time.monotonic()))

    def answered(self, findings: Findings | Unanalysed | None) -> Findings | None:
        """The findings of the window that was asked about, with the line; None without a question or a line."""
        question, self._question = self._question, None
        words = None if question is None else question.words(self._answers)
        if question is None or words is None or not isinstance(findings, Findings):
            return None
        return findings.with_code(question.rank, words)


def _nearest_peers(rank: int, healthy: Iterable[int], report: Report) -> list[int]:
    """Healthy ranks that do the same work: of the same stage, if there are any, and near."""
    stages = {row.rank: row.worker.pp_rank for row in report.by_worker or ()}
    return sorted(healthy, key=lambda peer: (stages.get(peer) != stages.get(rank), abs(peer - rank)))[:PEERS]


def _line_apart(slow: StackSamples, peers: Collection[StackSamples], share: float) -> _Line | None:
    """The line at which one rank is more often than each of its peers, by more than chance explains and by at least
    half of `share`; of the lines with most of the largest excess, the deepest of the user's own code.
    """
    excess = {
        line: min(slow.share_at(line) - peer.share_at(line) for peer in peers)
        for line in slow.lines
        if all(slow.is_more_often_at(line, peer) for peer in peers)
    }
    largest = max(excess.values(), default=0.0)
    if largest <= 0 or largest < share / 2:
        return None
    own_lines = [line for line, more in excess.items() if more >= _MOST_OF_IT * largest]
    return max(own_lines, key=lambda line: (not any(mark in line.file for mark in _LIBRARIES), line.depth))
