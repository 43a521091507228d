"""The content of the flight recorders of a job's ranks: the interface between the reader of dumps and the hang
analysis.

In: columns that `collectors.importers.flight_recorder` reads. Out: a `FlightRecord`, which `analysis.hang` takes.
PyTorch's flight recorder keeps the last collectives and transfers of each rank, finished or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import polars as pl


class Progress(IntEnum):
    """How far an operation has got on one rank."""

    SCHEDULED = 0
    STARTED = 1
    FINISHED = 2


@dataclass(frozen=True, slots=True)
class DumpedGroup:
    """The ranks that communicate with each other under one name; `ranks` in the group's own order."""

    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankDump:
    """What one rank left behind.

    `problem`: why its dump cannot be read, None if it can. `doubt`: what is damaged in it, None if nothing is: the rank
    may have done what the damage hides, so its silence proves nothing, and it is never a culprit. `operations`: number
    of entries, including finished ones. `starts`: it shows which operations have started on the device.
    `host`, `stack` (innermost frame first), `phase` (what the rank is known to be busy with) and `process` (what the
    system reports about a process that did not answer) are None if the dump does not contain them; PyTorch's own dumps
    never do.
    """

    source: str
    problem: str | None = None
    doubt: str | None = None
    operations: int = 0
    host: str | None = None
    phase: str | None = None
    process: str | None = None
    stack: tuple[str, ...] | None = None
    starts: bool = False


#: One row per operation of one rank. `sequence` counts the collectives (or the transfers) of a group on that rank,
#: `order` all operations of the rank as it issued them; `source` and `target` are ranks of the job, null in
#: collectives; `elements` counts those of all input tensors, null, like `dtypes`, if the entry is damaged there;
#: `progress` is a `Progress`.
OPERATIONS = pl.Schema(
    {
        "rank": pl.Int32(),
        "group": pl.Int32(),
        "sequence": pl.Int64(),
        "order": pl.Int64(),
        "name": pl.String(),
        "source": pl.Int32(),
        "target": pl.Int32(),
        "sizes": pl.String(),
        "elements": pl.Int64(),
        "dtypes": pl.String(),
        "created_ns": pl.Int64(),
        "progress": pl.Int8(),
        "call_site": pl.String(),
        "p2p": pl.Boolean(),
    }
)
#: What a rank's process group reports about itself: sequence numbers of its last issued and last finished operation.
STATUSES = pl.Schema({"rank": pl.Int32(), "group": pl.Int32(), "issued": pl.Int64(), "finished": pl.Int64()})


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The dumps of one job.

    `operations` and `statuses`: columns as above; `group` is an index into `groups`. `dumps` has the ranks that left a
    file; the other ranks of the `world_size` left none. `taken_ns`: when the state was recorded, None if unknown.
    `seen_as`: what the ranks of `dumps` have done to be known.
    """

    world_size: int
    groups: tuple[DumpedGroup, ...]
    operations: pl.DataFrame
    statuses: pl.DataFrame
    dumps: Mapping[int, RankDump]
    taken_ns: int | None = None
    notes: tuple[str, ...] = field(default=())
    seen_as: str = "left a dump"
