"""Opens an export of Nsight Systems, a SQLite file that `nsys export --type sqlite` wrote, and reads NCCL's ranges."""

from __future__ import annotations

import re
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tracekit.base.errors import FormatError
from tracekit.base.paths import unreadable
from tracekit.collectors.importers.kineto.event_columns import NO_ID, Ints, Table, rows_of
from tracekit.collectors.importers.kineto.json_events import CollectiveArgs

_AGAIN = "export it again: `nsys export --type sqlite REPORT.nsys-rep`"
#: Where the head of a SQLite file, all of big-endian integers, says how long the file is.
_PAGE_BYTES, _CHANGES, _PAGES, _PAGES_AS_OF = slice(16, 18), slice(24, 28), slice(28, 32), slice(92, 96)
#: SQLite keeps what is not yet in a file next to it.
_UNFINISHED = ("-wal", "-journal")


class Export:
    """The tables of an open file. Versions of Nsight Systems have different ones: a missing table has no rows, a
    missing column is -1, or None for text.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path, self._connection = path, connection
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        self._columns = {
            table: {row[1] for row in connection.execute(f"PRAGMA table_info({_quoted(table)})")} for (table,) in tables
        }

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is such a table with these columns."""
        return self._columns.get(table, set()) >= set(columns) and table in self._columns

    def rows(
        self,
        table: str,
        numbers: Sequence[str],
        texts: Sequence[tuple[str, str]] = (),
        where: str = "",
        needs: Sequence[str] = (),
    ) -> Iterator[tuple[Any, ...]]:
        """Yield some columns of all rows: numbers first. `texts`: the column of a text, or of its id in StringIds.

        Raises FormatError if the table lacks a column that it `needs`.
        """
        if table not in self._columns:
            return iter(())
        if missing := [name for name in needs if not self.has(table, name)]:
            raise FormatError(f"{self._path}: the table {table} lacks the column {missing[0]}; {_AGAIN}")
        wanted = [f"coalesce({_quoted(name)}, -1)" if self.has(table, name) else "-1" for name in numbers]
        wanted += [self._text(table, name, number) for name, number in texts]
        return self._connection.execute(f"SELECT {', '.join(wanted)} FROM {_quoted(table)} WHERE {where or 1}")  # noqa: S608

    def strings(self, table: str, column: str) -> dict[int, str]:
        """Return the texts that a column of ids refers to, by id."""
        if not (self.has(table, column) and self.has("StringIds", "id", "value")):
            return {}
        ids = f"SELECT {_quoted(column)} FROM {_quoted(table)}"  # noqa: S608
        return dict(self._connection.execute(f"SELECT id, value FROM StringIds WHERE id IN ({ids})"))  # noqa: S608

    def _text(self, table: str, name: str, number: str) -> str:
        sources = [_quoted(name)] if self.has(table, name) else []
        if self.has(table, number) and self.has("StringIds", "id", "value"):
            sources.append(f"(SELECT value FROM StringIds WHERE id = {_quoted(number)})")  # noqa: S608
        return f"coalesce({', '.join(sources)}, NULL)" if sources else "NULL"


@contextmanager
def opened(path: Path) -> Iterator[Export]:
    """Open an export. Raises FormatError if it is cut, damaged, or still being written, also while it is read."""
    try:
        _check_whole(path)
        # Immutable: SQLite would create files next to one in WAL mode, and fail in a folder that cannot be written.
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            yield Export(path, connection)
    except (sqlite3.Error, ValueError, OverflowError) as error:
        if isinstance(error, FormatError):
            raise
        why = error if isinstance(error, sqlite3.Error) else "a column of numbers holds something else"
        raise FormatError(f"{path}: damaged ({why}); copy it again, or {_AGAIN}") from None
    except OSError as error:
        raise unreadable(path, error) from None


def columns(rows: Iterable[tuple[int, ...]], names: Sequence[str]) -> dict[str, Ints]:
    """Return the columns of rows of numbers, by name. No row is kept as an object."""
    numbers = np.fromiter(chain.from_iterable(rows), np.int64).reshape(-1, len(names))
    return {name: numbers[:, place].copy() for place, name in enumerate(names)}


def _check_whole(path: Path) -> None:
    for ending in _UNFINISHED:
        companion = Path(f"{path}{ending}")
        if companion.is_file() and companion.stat().st_size:
            raise FormatError(f"{path}: still being written, as {companion.name} beside it shows; wait, or {_AGAIN}")
    with path.open("rb") as file:
        head = file.read(100)
    page, pages = int.from_bytes(head[_PAGE_BYTES]), int.from_bytes(head[_PAGES])
    whole, size = (65536 if page == 1 else page) * pages, path.stat().st_size
    if size < whole and head[_CHANGES] == head[_PAGES_AS_OF]:
        raise FormatError(f"{path}: cut off, {size:,} of {whole:,} bytes are there; copy it again, or {_AGAIN}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


#: NCCL's labels of what a payload holds, by our names.
_LABELS = {
    "communicator": "NCCL communicator ID", "bytes": "Message size [bytes]", "peer": "Peer rank",
    "size": "No. of ranks", "rank": "Rank", "device": "CUDA device",
}  # fmt: skip
_PLACES = {label: place for place, label in enumerate(_LABELS.values())}
#: NVTX's numbers of integer types, as `struct` names them.
_INTEGERS = {5: "<i", 6: "<I", 7: "<q", 8: "<Q", 9: "<q", 10: "<Q", 15: "<i", 16: "<I", 17: "<q", 18: "<Q", 22: "<Q"}
#: What comes before a binary payload: its domain, its schema, its bytes, and all bytes.
_HEAD = struct.Struct("<4Q")
#: Of each schema: which label, its type, and its place in the payload.
_Schemas = Mapping[int, Sequence[tuple[int, str, int]]]
_CALL = re.compile(r"nccl([A-Z]\w*)")
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


def nccl_calls(export: Export) -> tuple[Table, tuple[str, ...]]:
    """Return the calls with payloads: start (ns), thread, `call`, _LABELS (-1 if not there); and the names of calls."""
    names: dict[str, int] = {}
    schemas = _schemas(export)

    def calls() -> Iterator[tuple[int, ...]]:
        if not export.has("NVTX_EVENTS", "binaryData"):
            return
        texts, where = (("text", "textId"), ("binaryData", "")), "binaryData IS NOT NULL"
        for start, thread, text, binary in export.rows("NVTX_EVENTS", ("start", "globalTid"), texts, where):
            values = _decoded(binary, schemas)
            if values[0] != NO_ID and text is not None and (name := _CALL.match(text)):
                yield start, thread, names.setdefault(_WORD.sub("_", name[1]).lower(), len(names)), *values

    return columns(calls(), ("start", "thread", "call", *_LABELS)), tuple(names)


def collectives(
    launched: Table, calls: Table, names: Sequence[str], rank: Ints
) -> tuple[Ints, tuple[CollectiveArgs, ...]]:
    """Return the arguments of NCCL's kernels, and which of them each has, -1 for none, [kernels].

    `launched`: the thread, the start of the launch (ns) and the rank of each. `rank`: of the job, that made each of the
    `calls`, -1 for none. A kernel does what its thread called
    since it launched the kernel before: a group of calls is launched when it ends.
    """
    numbers: dict[CollectiveArgs, int] = {}
    sizes, members = _communicators(calls, rank)
    name_index = np.full(len(launched["start"]), NO_ID)
    calls = rows_of(calls, np.flatnonzero(calls["bytes"] >= 0))
    calls = rows_of(calls, np.argsort(calls["start"], kind="stable"))
    for thread in np.unique(launched["thread"]).tolist():
        of_thread = rows_of(calls, np.flatnonzero(calls["thread"] == thread))
        kernels = np.flatnonzero(launched["thread"] == thread)
        kernels = kernels[np.argsort(launched["start"][kernels], kind="stable")]
        until = np.searchsorted(of_thread["start"], launched["start"][kernels], side="right").tolist()
        before = 0
        for kernel, end in zip(kernels.tolist(), until, strict=True):
            if end:
                group = {name: values[min(before, end - 1) : end] for name, values in of_thread.items()}
                args = _args(group, names, int(launched["rank"][kernel]), sizes, members)
                name_index[kernel] = numbers.setdefault(args, len(numbers))
            before = end
    return name_index, tuple(numbers)


def _communicators(calls: Table, rank: Ints) -> tuple[dict[int, int], dict[int, list[int]]]:
    """The number of ranks of each communicator, as far as known; and its ranks, by their place in it, if all are known.

    One that began before the recording has the ranks that use it, if there are several.
    """
    creations = np.flatnonzero((calls["size"] > 0) & (calls["rank"] >= 0))
    size = dict(zip(calls["communicator"][creations].tolist(), calls["size"][creations].tolist(), strict=True))
    ranks = {}
    for communicator in np.unique(calls["communicator"]).tolist():
        of_communicator = calls["communicator"] == communicator
        if communicator in size:
            of_members = creations[of_communicator[creations] & (rank[creations] >= 0)]
            by_place = dict(zip(calls["rank"][of_members].tolist(), rank[of_members].tolist(), strict=True))
            listed = [by_place[place] for place in sorted(by_place)]
        else:
            listed = [rank_number for rank_number in np.unique(rank[of_communicator]).tolist() if rank_number >= 0]
        if len(listed) == size.get(communicator, max(len(listed), 2)):
            ranks[communicator] = listed
    return size, ranks


def _args(
    group: Table, names: Sequence[str], rank: int, sizes: Mapping[int, int], ranks_of: Mapping[int, Sequence[int]]
) -> CollectiveArgs:
    """The arguments of the calls that one kernel does."""
    communicator = int(group["communicator"][-1])
    group = rows_of(group, np.flatnonzero(group["communicator"] == communicator))
    did = {names[call] for call in group["call"].tolist()}
    name = "send_recv" if did == {"send", "recv"} else names[group["call"][-1]]
    peers, members, peer = np.unique(group["peer"]).tolist(), ranks_of.get(communicator), None
    size = sizes.get(communicator, len(members) if members else None)
    if name in {"send", "recv"} and len(peers) == 1:
        peer = members[peers[0]] if members and 0 <= peers[0] < len(members) else peers[0]
    ends: tuple[int | None, int | None] = (None, None)
    if peer is not None:
        ends = (rank, peer) if name == "send" else (peer, rank)
    received = np.array([names[call] == "recv" for call in group["call"].tolist()])
    moved = int(group["bytes"][~received if name == "send_recv" else slice(None)].sum())
    listed, group_name = None if members is None else str(sorted(members)), f"{communicator & (1 << 64) - 1:#x}"
    return CollectiveArgs(
        name, moved, "Byte", size, group_name, group_ranks=listed, source=ends[0], destination=ends[1]
    )


def _schemas(export: Export) -> _Schemas:
    fields: dict[int, list[tuple[int, str, int]]] = {}
    entries = export.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES", ("schemaId", "type", "offset"), [("name", "")])
    for schema, kind, offset, label in set(entries):
        if label in _PLACES and kind in _INTEGERS:
            fields.setdefault(schema, []).append((_PLACES[label], _INTEGERS[kind], max(offset, 0)))
    return fields


def _decoded(payload: bytes | str, schemas: _Schemas) -> list[int]:
    """Return the integers of a binary payload, by _LABELS; -1 for those it lacks."""
    values = [NO_ID] * len(_LABELS)
    try:
        binary = bytes.fromhex(payload) if isinstance(payload, str) else payload
        for place, kind, offset in schemas.get(_HEAD.unpack_from(binary)[1], ()):
            (value,) = struct.unpack_from(kind, binary, _HEAD.size + offset)
            values[place] = (
                value - (1 << 64) if value >> 63 == 1 else value
            )  # a communicator's number fills all 64 bits
    except (struct.error, ValueError):  # cut, or of another kind
        return [NO_ID] * len(_LABELS)
    return values
