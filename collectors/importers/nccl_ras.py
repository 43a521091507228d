"""A report of NCCL's RAS (`ncclras`): how many operations the ranks of a communicator have launched.

In: lines of the report. Out: a `FlightRecord`, whose ranks are those within the communicator. Checked in NCCL's
`ras/client_support.cc` and its user guide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
from msgspec import Struct

from tracekit.base.errors import FormatError
from tracekit.base.text import listed
from tracekit.collectors.importers.flight_recorder_groups import MOST_RANKS
from tracekit.trace.dumps import OPERATIONS, STATUSES, DumpedGroup, FlightRecord, Progress, RankDump

_COMMUNICATOR = re.compile(r"^\s*#(\d+-\d+) \(([0-9a-f]+)\)")
_COUNTS = re.compile(r"Communicator ranks have different (\w+) operation counts")
_LAUNCHED = r"(?:launched up to operation (\d{1,18})|not launched any operations)"
_MANY = re.compile(rf"^\s*(\d{{1,7}}) ranks have {_LAUNCHED}")
_ONE = re.compile(rf"^\s*Rank (\d{{1,7}}) has {_LAUNCHED}")
_PLACE = re.compile(r"Rank (\d{1,7})\b.*-- GPU (\S+) managed by process (\d+) on node (\S+)")
_UNREACHABLE = re.compile(r"Process (\d+) on node (\S+) managing GPUs? ([\d, ]+)")
_SNAPSHOT = (
    "read from a report of RAS: ranks are those of the communicator, and operations count once they are launched. Ranks"
    " of a job that runs can be apart for a moment: ask again; if no count has risen, this is a hang"
)
#: Most places of ranks in the notes.
_MOST_PLACES = 8


class _Counts(Struct):
    """How many operations of a kind the ranks of a communicator have launched: those that are listed, and how many
    others have the same count, by that.
    """

    communicator: str
    operation: str
    launched: dict[int, int] = {}
    others: dict[int, int] = {}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.launched) + sum(self.others.values())

    def complete(self) -> dict[int, int] | None:
        """The count of every rank; None if the report does not tell those that are not listed apart."""
        counts = [count for count, ranks in self.others.items() if ranks > 0]
        if len(counts) > 1 or self.size >= MOST_RANKS or max(self.launched, default=0) >= self.size:
            return None
        return dict.fromkeys(range(self.size), *counts) | self.launched if counts else self.launched


def ras_record(lines: Sequence[str], source: str) -> FlightRecord | None:
    """What RAS says of the largest communicator whose ranks differ; None if the lines are no such report.

    Raises FormatError if it names no rank that is behind.
    """
    counts, places = _read(lines)
    complete = [
        (counted, ranks) for counted in counts if (ranks := counted.complete()) and len(set(ranks.values())) > 1
    ]
    matches = filter(None, map(_UNREACHABLE.search, lines))
    unreachable = [f"process {match[1]} on node {match[2]} (GPU {match[3].strip()})" for match in matches]
    if not complete:
        if not counts and not unreachable:
            return None
        why = f"it cannot reach {listed(unreachable, 3)}: look there first" if unreachable else "give the whole report"
        raise FormatError(f"{source}: a report of RAS that names no rank which others wait for; {why}")
    largest = max(complete, key=lambda pair: pair[0].size)[0].communicator
    chosen = [(counted, ranks) for counted, ranks in complete if counted.communicator == largest]
    size = max(counted.size for counted, _ in chosen)
    others = sorted({counted.communicator for counted in counts} - {largest})
    return FlightRecord(
        world_size=size,
        groups=tuple(DumpedGroup(largest, tuple(range(counted.size))) for counted, _ in chosen),
        operations=pl.DataFrame(
            [
                row
                for place, (counted, ranks) in enumerate(chosen)
                for row in _rows(place, counted.operation.lower(), ranks)
            ],
            schema=OPERATIONS,
            orient="row",
        ),
        statuses=pl.DataFrame(
            [
                (rank, place, launched, min(ranks.values()))
                for place, (_, ranks) in enumerate(chosen)
                for rank, launched in ranks.items()
            ],
            schema=STATUSES,
            orient="row",
        ),
        dumps={rank: RankDump(source, operations=1, host=places.get(rank, ("", None))[1]) for rank in range(size)},
        notes=(
            _SNAPSHOT,
            *[words for words, _ in places.values()][:_MOST_PLACES],
            *([f"ranks of other communicators differ, too: {listed(others, 4)}"] if others else []),
            *(f"RAS cannot reach {where}" for where in unreachable[:_MOST_PLACES]),
        ),
        seen_as="answered RAS",
    )


def _read(lines: Sequence[str]) -> tuple[list[_Counts], dict[int, tuple[str, str]]]:
    """The counts of all communicators that differ, and the place of each listed rank, in words, with its host."""
    counts, places = list[_Counts](), dict[int, tuple[str, str]]()
    communicator, launched = "communicator", None
    for line in lines:
        if match := _COMMUNICATOR.search(line):
            communicator, launched = f"communicator #{match[1]} ({match[2]})", None
        elif match := _COUNTS.search(line):
            counts.append(_Counts(communicator, match[1], {}, {}))
            launched = None
        elif counts:
            place = _PLACE.search(line)
            if place is not None:
                words = f"rank {place[1]} is process {place[3]} on {place[4]}, GPU {place[2]}"
                places[int(place[1])] = words, place[4]
            if match := _ONE.search(line):
                counts[-1].launched[int(match[1])], launched = int(match[2] or 0), None
            elif match := _MANY.search(line):
                launched = int(match[2] or 0)
                counts[-1].others[launched] = int(match[1])
            elif place is not None and launched is not None:
                counts[-1].launched[int(place[1])] = launched
                counts[-1].others[launched] -= 1
    return counts, places


def _rows(place: int, operation: str, ranks: dict[int, int]) -> Iterator[dict[str, Any]]:
    """The operations in which ranks wait that have launched more than others."""
    least = min(ranks.values())
    for rank, launched in ranks.items():
        for number in sorted({least + 1, launched} if launched > least else ()):
            row = dict.fromkeys(OPERATIONS.names()) | {"sizes": "", "dtypes": "", "elements": 0, "created_ns": 0}
            row |= {"rank": rank, "group": place, "sequence": number, "order": number, "name": operation}
            yield row | {"progress": int(Progress.SCHEDULED), "p2p": False}
