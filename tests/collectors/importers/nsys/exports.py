"""Exports of Nsight Systems by hand: a few rows, times in microseconds from the start of the session."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

KERNEL, COPY, SET, CALL, NVTX = (
    "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS",
)  # fmt: skip
GEMM = "void gemm<float>(T1 *)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)"
#: The first moment of a session is not 0.
BEGAN_US = 60_000_000

Row = tuple[str, Mapping[str, Any]]


def pid(process: int) -> int:
    """As Nsight Systems writes a process: after the number of the machine."""
    return (1 << 48) + (process << 24)


def _when(ts: float, dur: float) -> dict[str, int]:
    return {"start": round((BEGAN_US + ts) * 1000), "end": round((BEGAN_US + ts + dur) * 1000)}


def kernel(name: str, ts: float, dur: float, correlation: int = 0, *, process: int = 100, **more: Any) -> Row:
    ids = {"deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": correlation, "globalPid": pid(process)}
    grid = {"gridX": 4, "gridY": 1, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1}
    return KERNEL, {**_when(ts, dur), **ids, "demangledName": name, **grid, **more}


def copy(ts: float, dur: float, correlation: int, kind: int, **more: Any) -> Row:
    ids = {"deviceId": 0, "streamId": 7, "correlationId": correlation, "globalPid": pid(100)}
    return COPY, {**_when(ts, dur), **ids, "bytes": 4096, "copyKind": kind, **more}


def call(name: str, ts: float, dur: float, correlation: int, *, process: int = 100, thread: int = 1) -> Row:
    return CALL, {
        **_when(ts, dur), "globalTid": pid(process) + thread, "correlationId": correlation, "nameId": name,
    }  # fmt: skip


def launch(ts: float, correlation: int, **more: Any) -> Row:
    return call("cudaLaunchKernel_v7000", ts, 5, correlation, **more)


def span(text: str | None, ts: float, dur: float, *, process: int = 100, thread: int = 1, **more: Any) -> Row:
    """A range of NVTX."""
    return NVTX, {**_when(ts, dur), "eventType": 59, "text": text, "globalTid": pid(process) + thread, **more}


_SCHEMAS = {
    1: (("NCCL communicator ID", 18, None), ("No. of ranks", 5, 8), ("Rank", 5, 12), ("CUDA device", 5, 16)),
    2: (("NCCL communicator ID", 18, None), ("Message size [bytes]", 22, 8), ("Peer rank", 5, 16)),
}


def payload_tables() -> list[Row]:
    return [
        ("NVTX_PAYLOAD_SCHEMA_ENTRIES", {"schemaId": schema, "name": name, "type": kind, "offset": offset})
        for schema, entries in _SCHEMAS.items()
        for name, kind, offset in entries
    ]


def nccl(text: str, ts: float, schema: int, *values: int, **more: Any) -> Row:
    """A call of NCCL, with its payload: (communicator, ranks, rank, device) or (communicator, bytes, peer)."""
    content = struct.pack("<QIIi4x" if schema == 1 else "<QQi4x", *values)
    head = struct.pack("<4Q", 1, schema, len(content), 32 + len(content))
    return span(text, ts, 2, domainId=1, binaryData=head + content, **more)


def export(
    path: Path, rows: Iterable[Row], *, strings: str = "INTEGER PRIMARY KEY", texts: Mapping[int, str] | None = None
) -> Path:
    """Write the rows. A table has the columns of its rows; StringIds has `texts`, and names of kernels and calls."""
    numbers = {text: number for number, text in (texts or {}).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"CREATE TABLE StringIds (id {strings}, value TEXT)")
        tables: dict[str, list[dict[str, Any]]] = {}
        for table, row in rows:
            there = dict(row)
            for name in {"demangledName", "shortName", "nameId"} & there.keys():
                there[name] = numbers.setdefault(there[name], 10 + len(numbers))
            tables.setdefault(table, []).append(there)
        for table, content in tables.items():
            names = list(dict.fromkeys(name for row in content for name in row))
            file.execute(f"CREATE TABLE {table} ({', '.join(f'{name!r}' for name in names)})")
            insert = f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})"  # noqa: S608
            file.executemany(insert, [[row.get(name) for name in names] for row in content])
        file.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, text) for text, number in numbers.items()])
        file.commit()
    return path


TWO_RANKS = [
    row
    for rank in (0, 1)
    for row in (
        launch(0, 1, process=100 + rank),
        launch(10, 2, process=100 + rank),
        kernel(GEMM, 20, 30, 1, process=100 + rank, deviceId=rank),
        kernel(ALL_REDUCE, 60 + 10 * rank, 40 - 10 * rank, 2, process=100 + rank, deviceId=rank, streamId=20 + rank),
    )
]
