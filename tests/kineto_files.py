"""Traces of torch.profiler by hand: a few events, one file per rank."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

COMPUTE, COMM = 7, 20
GEMM = "ampere_sgemm_128x64_tn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"


def event(
    category: str, name: str, ts: float, dur: float, *, pid: Any = 100, tid: Any = 100, **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(
    name: str, ts: float, dur: float, *, stream: int = COMPUTE, correlation: int = -1, **args: Any
) -> dict[str, Any]:
    return event(
        "kernel", name, ts, dur, pid=0, tid=stream, device=0, stream=stream, correlation=correlation, **args
    )  # fmt: skip


def launch(ts: float, correlation: int, *, tid: int = 100, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return event("cuda_runtime", name, ts, 5, tid=tid, correlation=correlation)


def all_reduce(
    ts: float, dur: float, *, elements: int = 64, ranks: Sequence[int] = (0, 1), **more: Any
) -> dict[str, Any]:
    args = {
        "Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float",
        "Group size": len(ranks), "Process Group Name": "0", "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(ranks)),
    }  # fmt: skip
    return kernel(ALL_REDUCE, ts, dur, stream=COMM, **{**args, **more})


def document(
    events: Iterable[Mapping[str, Any]], rank: int | None = 0, world: int | None = 2, **head: Any
) -> dict[str, Any]:
    info = (
        {"backend": "nccl"}
        | ({} if rank is None else {"rank": rank})
        | ({} if world is None else {"world_size": world})
    )
    return {"schemaVersion": 1, "distributedInfo": info, **head, "traceEvents": list(events)}


def write(path: Path, content: Any) -> Path:
    """JSON, gzipped where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
