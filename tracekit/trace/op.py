"""A job of any shape: the op trace, one row per op with what it waits for; and the GPU recording that becomes one.

In: a polars frame or a Parquet file that any tool can write (docs/traces.md); columns that an importer read
(`collectors/importers/kineto/`). Out: `OpTrace`, whose values are checked when the graph is built
(`analysis/graph/op_rules.py`); `GpuRecording`, what a profiler saw on the GPUs and hosts of a job, before any analysis,
which `analysis/gpu/` matches, aligns and turns into an op trace.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np
import polars as pl

from tracekit.base.errors import FormatError
from tracekit.base.text import encodable, quoted
from tracekit.trace.gpu_activity import PROFILER_LINE, LostOps, ProfilerCost
from tracekit.trace.model import ProcessGroup, TraceKind, numbered_hosts

#: Begins the annotation of torch's data loader.
LOADER = "enumerate(DataLoader)#"
#: Names of Python that a CUDA graph or a compiled model does not run: torch's own, and that of modules.
OF_TORCH = re.compile(r"nn\.Module: |(.*/)?torch/|<built-in (method|function) \w+ of type object|.*autograd")
#: Text of few different values: four bytes a row, where a string takes sixteen.
_TEXT: Any = pl.Categorical()
#: One row per GPU op, by rank and start. Times: seconds from the start of the recording, by the rank's own clock.
#: `launch`: row of the call that launched it, null if that is outside the recording. `step`: of the launch. `shape`: of
#: its grid and blocks; `bytes`: of a copy, if recorded; `occupancy`: of a kernel, as estimated, percent.
#: `stated`: whether the kernel itself states its collective; otherwise its launch does, if there
#: is one. `group`: name of a process group, null if unknown. `sent`, `received`: rows to and from each rank of it, in
#: an all-to-all of unequal parts, as text such as "[320, 626]", which ends in "...]" if the profiler cut it.
GPU_OP_SCHEMA = pl.Schema(
    {
        "rank": pl.Int32,
        "device": pl.Int64,
        "stream": pl.Int64,
        "start": pl.Float64,
        "duration": pl.Float64,
        "name": _TEXT,
        "activity": _TEXT,
        "kernel_class": _TEXT,
        "shape": _TEXT,
        "bytes": pl.Int64,
        "occupancy": pl.Int64,
        "launch": pl.Int64,
        "step": pl.Int32,
        "stated": pl.Boolean,
        "collective": _TEXT,
        "elements": pl.Int64,
        "dtype": _TEXT,
        "group": _TEXT,
        "sequence": pl.Int64,
        "comms_id": _TEXT,
        "source": pl.Int32,
        "destination": pl.Int32,
        "sent": _TEXT,
        "received": _TEXT,
    }
)
#: One row per call of the runtime that launches, synchronises or orders, by rank and start. `busy_since`: when the
#: thread began what it was doing at the start of the call. `operator`: the framework's outermost operator around it;
#: `inner`: the innermost, and its `inputs`, sizes and types as JSON; `module`: the innermost nn.Module; `own`: the
#: innermost line of Python outside of torch, such as "train.py(88): step"; `annotated`: the shortest annotation such as
#: "attn(F)" around it, on any thread. `waits`: whether it waits for the GPU. `recorded_s`: what recording had cost its
#: thread before it, seconds.
#: `recomputed`: true inside the recomputation of an activation checkpoint, else null.
#: `phase`: forward, backward, optimizer or data. `action`: of torch's pipeline schedule, such as PP:2F0.
#: `collective_call`: whether the framework called it for a collective.
#: `waits_stream`, `waits_for_stream`, `waits_for_record`: of recorded synchronisation, else null.
CALL_SCHEMA = pl.Schema(
    {
        "rank": pl.Int32,
        "thread": pl.Int64,
        "start": pl.Float64,
        "duration": pl.Float64,
        "name": _TEXT,
        "role": _TEXT,
        "busy_since": pl.Float64,
        "operator": _TEXT,
        "inner": _TEXT,
        "inputs": _TEXT,
        "module": _TEXT,
        "own": _TEXT,
        "annotated": _TEXT,
        "waits": pl.Boolean,
        "recorded_s": pl.Float64,
        "recomputed": pl.Boolean,
        "phase": _TEXT,
        "action": _TEXT,
        "collective_call": pl.Boolean,
        "step": pl.Int32,
        "waits_stream": pl.Int64,
        "waits_for_stream": pl.Int64,
        "recorded_at": pl.Float64,
    }
)
#: What a host thread did, by rank, thread and start; times with no recorded event have no row. `what`: row of
#: WHAT_SCHEMA.
HOST_SCHEMA = pl.Schema(
    {"rank": pl.Int32, "thread": pl.Int32, "start": pl.Float64, "duration": pl.Float64, "what": pl.Int32}
)
#: What threads did. `reason`: that of a GPU which is idle meanwhile (`IdleReason`). `name`: its operator, "call in
#: operator", Python function or annotation. `where`: the innermost line of Python outside of torch, "" if unknown.
#: `busy`: whether it is inside an operator or a call; `launches`: inside an operator that launches kernels.
WHAT_SCHEMA = pl.Schema(
    {"reason": pl.String, "name": pl.String, "where": pl.String, "busy": pl.Boolean, "launches": pl.Boolean}
)
#: Memory of the GPU of a rank: bytes that torch's allocator has given out (`allocated`) and keeps (`reserved`).
MEMORY_SCHEMA = pl.Schema({"rank": pl.Int32, "start": pl.Float64, "allocated": pl.Int64, "reserved": pl.Int64})
STEP_SCHEMA = pl.Schema({"rank": pl.Int32, "step": pl.Int32, "start": pl.Float64, "duration": pl.Float64})


@dataclass(frozen=True, slots=True)
class OpTrace:
    """One job of any shape (`kind`): its ops, the names of its ranks' coordinates, and its process groups.

    `ops`: a column each for `rank`, `start` and `duration` (seconds); optional: `step`, `kind`, `name`, `peer`,
    `stream`, `rendezvous`, `group`, `waits_for` (lists of row numbers), `why` (lists of as many words) and labels.
    `axes`: labels that are coordinates of ranks, such as dp_rank. `rules`: where dependencies come from, `explicit`
    (the column `waits_for`) and `streams` (ops of one stream of a rank run in order of start). `groups`: process
    groups, which the column `group` names. `name`: of the job. `metadata`: plain JSON data. `step_starts`: none,
    because times count from the start of each step.
    """

    kind: ClassVar[Literal[TraceKind.OPS]] = TraceKind.OPS
    step_starts: ClassVar[Mapping[int, float]] = {}
    ops: pl.DataFrame
    name: str
    axes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ("explicit",)
    groups: tuple[ProcessGroup, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> np.ndarray:
        """The step numbers, ascending, int32 [steps]."""
        return (
            self.ops["step"].cast(pl.Int32).unique().sort().to_numpy()
            if "step" in self.ops.columns
            else np.zeros(1, np.int32)
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks, by the name of that size."""
        return {"world_size": self.ops["rank"].n_unique()}

    def overview(self) -> dict[str, str]:
        """What it holds, for people: a line each, by its heading."""
        return {
            "Kind": "op trace (docs/traces.md)",
            "Rules": ", ".join(self.rules),
            "Axes": ", ".join(self.axes) or "none",
            "Groups": f"{len(self.groups):,}",
            "Ranks": f"{self.ops['rank'].n_unique():,}",
            "Steps": f"{len(self.steps):,}",
        }

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the op trace; replaces only another trace. Raises OutputError."""
        from tracekit.base.atomic_write import replacing
        from tracekit.trace.canonical import TRACE_FILE  # most recordings of GPUs become no file

        with replacing(path, TRACE_FILE) as temporary, open(temporary, "wb") as file:
            self.write_to(file)

    def write_to(self, file: BinaryIO) -> None:
        """Write the content of the Parquet file."""
        from tracekit.trace.canonical import METADATA_KEY, OP_TRACE_VERSION

        header = {
            "schema_version": OP_TRACE_VERSION,
            "name": self.name,
            "axes": list(self.axes),
            "rules": list(self.rules),
            "groups": {group.name: list(group.ranks) for group in self.groups},
            "metadata": dict(self.metadata),
        }
        self.ops.write_parquet(file, compression="zstd", metadata={METADATA_KEY: json.dumps(header)})


def read_op_trace(path: str | os.PathLike[str]) -> OpTrace:
    """Read an op trace. Raises FormatError if the file is not one."""
    from tracekit.trace.canonical import OP_TRACE_VERSION, read_columns, read_header

    header = read_header(path)
    if header is None or header.get("schema_version") != OP_TRACE_VERSION:
        raise FormatError(f"{path}: not an op trace (schema version {OP_TRACE_VERSION}); see docs/traces.md")
    ops = read_columns(path)
    if ops.is_empty():
        raise FormatError(f"{path}: no ops (0 rows); record at least one step")
    try:
        groups = {str(name): tuple(map(int, ranks)) for name, ranks in header.get("groups", {}).items()}
        return OpTrace(
            ops=ops,
            name=encodable(str(header.get("name") or Path(os.fsdecode(path)).stem)),
            axes=tuple(map(str, header.get("axes", ()))),
            rules=tuple(map(str, header.get("rules", ("explicit",)))),
            groups=tuple(ProcessGroup(name, tuple(sorted(ranks))) for name, ranks in groups.items()),
            metadata=dict(header.get("metadata", {})),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path}: damaged tracekit metadata ({quoted(error)}); write the trace again") from None


@dataclass(frozen=True)
class GpuRecording:
    """One job. `gpu_ops`: GPU_OP_SCHEMA, `calls`: CALL_SCHEMA. `hosts`: host of each rank, as far as known.

    `files`: where each rank was read from. `groups`: the process groups that `gpu_ops` names. `step_spans`: the marked
    steps, STEP_SCHEMA. `host`: HOST_SCHEMA, `whats`: WHAT_SCHEMA, `memory`: MEMORY_SCHEMA. `spans`: the first start and
    the last end of all events of a rank, seconds. `notes`: what was lost or guessed while reading, one sentence each.
    `world_size`: number of ranks of the job, `device_name`: its kind of GPU, `multiprocessors`: how many SMs that
    has, if the files give them. `cut`: the ranks
    whose files lack their end. By rank: `damaged`, the share of its events that were left out or repaired; `unlinked`,
    the share of its GPU ops and launches whose other half is missing; `lost`, launches whose GPU ops the file lacks;
    `left_out`, why a rank with a file is not in the tables. `coordinates`: of ranks on the job's mesh by label, such as
    tp_rank, as far as process groups are named after axes; `axes`: the labels that do not depend on others. `costs`:
    what recording costs the host of a rank; without ranks of which that is not known. `began_s`: when time 0 was,
    seconds since 1970, None if the files do not say.
    """

    name: str
    gpu_ops: pl.DataFrame
    calls: pl.DataFrame
    step_spans: pl.DataFrame
    host: pl.DataFrame
    whats: pl.DataFrame
    memory: pl.DataFrame
    spans: Mapping[int, tuple[float, float]]
    hosts: Mapping[int, str]
    files: Mapping[int, str]
    groups: tuple[ProcessGroup, ...]
    world_size: int | None = None
    notes: tuple[str, ...] = ()
    device_name: str | None = None
    multiprocessors: int | None = None
    cut: tuple[int, ...] = ()
    damaged: Mapping[int, float] = field(default_factory=dict)
    unlinked: Mapping[int, float] = field(default_factory=dict)
    lost: Mapping[int, LostOps] = field(default_factory=dict)
    left_out: Mapping[int, str] = field(default_factory=dict)
    coordinates: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    costs: Mapping[int, ProfilerCost] = field(default_factory=dict)
    began_s: float | None = None

    def redacted(self) -> GpuRecording:
        """The recording without names: hosts, Python functions, lines and modules are numbered, and files go by the
        rank in them. Names of kernels, operators and process groups stay, so that the diagnosis is the same.
        """
        python = pl.col("reason").is_in(["python", "loader"])
        call_names = (self.calls[name].unique(maintain_order=True).cast(pl.String) for name in ("own", "module"))
        names = pl.concat([self.whats.filter(python)["name"], self.whats["where"], *call_names])
        numbered = {name: _alias(name, i) for i, name in enumerate(names.drop_nulls().unique(maintain_order=True))}
        notes = list(self.notes)
        for rank, file in self.files.items():
            notes = [note.replace(str(file), f"rank {rank}").replace(Path(file).name, f"rank {rank}") for note in notes]
        return replace(
            self,
            name="job",
            hosts=numbered_hosts(self.hosts),
            files={rank: f"rank {rank}" for rank in self.files},
            whats=self.whats.with_columns(
                name=pl.when(python).then(pl.col("name").replace(numbered)).otherwise("name"),
                where=pl.col("where").replace(numbered),
            ),
            calls=self.calls.with_columns(pl.col("own", "module").replace(numbered)),
            notes=tuple(notes),
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The recorded ranks, ascending."""
        return tuple(sorted(self.files))


def joined(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """The rows of all frames, null in columns that a frame lacks; empties the list.

    Each column becomes one chunk, one after the other: queries copy frames in several chunks as a whole.
    """
    rows = pl.concat(frames, how="diagonal")
    frames.clear()
    return pl.DataFrame([rows.drop_in_place(name).rechunk() for name in rows.columns])


def _alias(name: str, number: int) -> str:
    """A substitute for the name of a Python function, line, module or annotation, with only what the analysis needs."""
    if not name or name.startswith((LOADER, "torch/")):
        return name
    if PROFILER_LINE.match(name):
        return name[name.rindex("torch/") :]
    kind = "function" if ".py(" in name or name.startswith("<") else "annotation"
    return f"{'torch/' if OF_TORCH.match(name) else f'{kind} '}{number}"
