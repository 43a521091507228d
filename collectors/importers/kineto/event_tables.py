"""The tables that the events of a file are kept in, and the classes of calls by the names around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracekit.trace.gpu_activity import Activity

#: Marks a missing id.
NO_ID = -1

Ints = npt.NDArray[np.int64]

_GPU_CATEGORIES = {
    "kernel": Activity.KERNEL, "concurrent_kernel": Activity.KERNEL, "gpu_memcpy": Activity.MEMCPY,
    "gpu_memset": Activity.MEMSET, "memcpy": Activity.MEMCPY, "memset": Activity.MEMSET,
}  # fmt: skip
_CALL_CATEGORIES = (
    "cuda_runtime",
    "cuda_driver",
    "runtime",
    "driver",
    "xpu_runtime",
    "mtia_runtime",
    "privateuse1_runtime",
)
_OPERATOR_CATEGORIES = ("cpu_op", "operator", "cpu_instant_event")
_ANNOTATION_CATEGORIES = ("user_annotation", "python_gc")
_PYTHON_CATEGORIES = ("python_function",)

#: A table of events: arrays by name, all of one length.
Table = dict[str, npt.NDArray[Any]]

_TIMES = {"part": np.int32, "ts": np.float64, "dur": np.float64}
_GPU_TYPES = _TIMES | {
    "name": np.int32, "activity": np.int8, "device": np.int64, "stream": np.int64, "correlation": np.int64,
    "shape": np.int32, "size": np.int64, "collective": np.int32,
}  # fmt: skip
_HOST_TYPES = _TIMES | {"thread": np.int32, "name": np.int32}
_CALL_TYPES = _HOST_TYPES | {"correlation": np.int64, "role": np.int8}
_OPERATOR_TYPES = _HOST_TYPES | {"shape": np.int32, "collective": np.int32}
_SYNC_TYPES = _TIMES | dict.fromkeys(("stream", "correlation", "waits_for_stream", "waits_for_record"), np.int64)


@dataclass(frozen=True, slots=True)
class CollectiveArgs:
    """The arguments of a collective; None where they are missing.

    `sent`, `received`: rows to and from each rank of the group, as text such as "[320, 626]".
    """

    collective: str | None
    elements_in: int | None
    elements_out: int | None
    dtype: str | None
    group_size: int | None
    group_name: str | None
    group_description: str | None
    group_ranks: str | None
    rank_in_group: int | None
    sequence: int | None
    comms_id: str | None
    source: int | None
    destination: int | None
    sent: str | None = None
    received: str | None = None


@dataclass(slots=True)
class FileColumns:
    """A file's events. Times: microseconds from `base_us`. `name`, `shape`: codes into `strings`.

    `collective`: positions in `collectives`, -1 for none. `size`: bytes of a copy, or the estimated occupancy of a
    kernel in percent, -1 if unknown. `memory`: bytes allocated and reserved on a GPU. `part`: the rank in a fused file,
    else 0. `python`: functions, where stacks were recorded. `host_events`: operators and annotations.
    `negative`: durations below 0 (taken as 0). Left out: `absurd`, events of more than a day or without times, or a day
    away from the others; `nameless`, without a name. `damaged`: the share of all of these among the events of GPUs or
    hosts, whichever is larger.
    """

    base_us: int
    gpu: Table
    calls: Table
    operators: Table
    annotations: Table
    python: Table
    syncs: Table
    memory: Table
    host_events: int
    strings: tuple[str, ...]
    collectives: tuple[CollectiveArgs, ...]
    negative: int
    absurd: int
    nameless: int
    damaged: float


def rows_of(table: Table, rows: Ints) -> Table:
    """Return some rows of a table."""
    return {name: values[rows] for name, values in table.items()}


_MEMORY_TYPES = _TIMES | dict.fromkeys(("device", "allocated", "reserved"), np.int64)

SCHEMAS: dict[str, dict[str, Any]] = {
    "gpu": _GPU_TYPES,
    "calls": _CALL_TYPES,
    "operators": _OPERATOR_TYPES,
    "annotations": _HOST_TYPES,
    "python": _HOST_TYPES,
    "syncs": _SYNC_TYPES,
    "memory": _MEMORY_TYPES,
}
#: Category of events -> table that they go into.
TABLES = {
    **dict.fromkeys(_GPU_CATEGORIES, "gpu"),
    **dict.fromkeys(_CALL_CATEGORIES, "calls"),
    **dict.fromkeys(_OPERATOR_CATEGORIES, "operators"),
    **dict.fromkeys(_ANNOTATION_CATEGORIES, "annotations"),
    **dict.fromkeys(_PYTHON_CATEGORIES, "python"),
    "cuda_sync": "syncs",
    "[memory]": "memory",  # events of the category cpu_instant_event
}
CATEGORIES = tuple(TABLES)
TABLE_OF = np.array([list(SCHEMAS).index(TABLES[name]) for name in CATEGORIES], np.int64)
ACTIVITY_OF = np.array(
    [list(Activity).index(_GPU_CATEGORIES[name]) if name in _GPU_CATEGORIES else -1 for name in CATEGORIES], np.int64
)


COLLECTIVE_OPERATOR = "record_param_comms"
STEP = re.compile(r"ProfilerStep#(\d{1,9})(?!\d)")
#: Names that mark the phase of a step; the first match counts.
_PHASE_PATTERNS = (
    ("optimizer", re.compile(r"^Optimizer\.(step|zero_grad)#|^optimizer", re.IGNORECASE)),
    ("backward", re.compile(r"^autograd::engine::evaluate_function|^#*\s*backward|^PP:\d+[BIW]\d", re.IGNORECASE)),
)
#: Phases by number; the first is the default.
PHASES = ("forward", *(phase for phase, _ in _PHASE_PATTERNS))
#: Calls that make the GPU do something.
LAUNCHES = re.compile(r"Launch|Memcpy|Memset")
#: Those that run something on a GPU, at once or as soon as its stream is free.
RUNS_ON_GPU = re.compile(r"^(cuda|hip|cu)((Graph)?Launch(?!HostFunc)|Mem(cpy|set))")
#: The calls around what is captured into a graph instead of run.
BEGINS_CAPTURE, ENDS_CAPTURE = re.compile(r"StreamBeginCapture"), re.compile(r"StreamEndCapture")
#: Annotations of torch, which its versions before 1.11 call operators.
ANNOTATION = re.compile(r"^(ProfilerStep|enumerate\(DataLoader\)|Optimizer\.(step|zero_grad))#")
#: Calls that wait for the GPU whatever they were given.
SYNCHRONISES = re.compile(r"(Device|Stream|Event|Ctx|Context)Synchronize")
#: Copies of which one side is the host: neither within a GPU nor between two.
HOST_COPY = re.compile(r"^(?!.*(DtoD|PtoP))")
#: Actions of torch.distributed.pipelining: PP:2F0 is the forward of microbatch 0 on stage 2.
PIPELINE_ACTION = re.compile(r"^PP:\d{1,6}(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)\d{1,9}$")
#: An annotation of a module's forward, backward or weight gradients, such as "attn(F)".
PASS_OF_MODULE = re.compile(r"\w+\([FBW]\)")
#: Functions that compute activations again, of torch, Megatron and DeepSpeed; and the backward inside of some of them.
RECOMPUTES = (
    re.compile(
        r"(^|/)torch/utils/checkpoint\.py\(\d+\): (recompute_fn|backward)$"
        r"|(^|/)(tensor_parallel/random|activation_checkpointing/checkpointing)\.py\(\d+\): backward$"
    ),
    re.compile(r"(^|/)torch/autograd/__init__\.py\(\d+\): backward$"),
)
NCCL_ANNOTATION = re.compile(r"^(?:nccl|rccl):(\w+)")


def codes_of_phases(names: Sequence[str]) -> list[list[int]]:
    """Return, for each of PHASES but the first, the positions of the names that mark it."""
    return [[code for code, name in enumerate(names) if pattern.search(name)] for _, pattern in _PHASE_PATTERNS]
