"""Files of a rank and of NCCL's plugin: layout, file names and environment variables, shared by writers and readers.

A segment is a header and records of one size, so an incomplete write costs at most one record. Facts (names, process
groups, mesh, pipeline) are JSON lines in a file next to it.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path

#: category, flags, name number, step, microbatch, stage index, peer or group number, start ns, end ns, extra, and the
#: number of the record on its rank, from 1.
RECORD = struct.Struct("<BBHiiiiqqqq")
#: magic, version, record size, rank, attempt, process id.
HEADER = struct.Struct("<8sHHiiq4x")
MAGIC = b"TKSEGMT\n"
VERSION = 2
NONE = -1
#: Maximum number of records a rank keeps in memory.
RING_CAPACITY = 1 << 16

ENV_DIRECTORY = "TRACEKIT_COLLECT_DIR"
ENV_OPTIONS = "TRACEKIT_COLLECT_OPTIONS"
ENV_RINGS = "TRACEKIT_COLLECT_RINGS"

OPEN_SUFFIX = ".open"
SEALED_SUFFIX = ".ops"
#: Number of the segment into which the launcher writes the records that a dead rank left in memory.
LEFT_OVER_SEGMENT = 99_999_999
FACTS_SUFFIX = ".facts"
#: A rank's progress, rewritten in place: count, process id, signal that makes it write its stacks (0: none),
#: world size.
PULSE = struct.Struct("<qqiq")
PULSE_SUFFIX = ".pulse"
#: Stacks of all threads of a rank, as `faulthandler` writes them.
STACKS_SUFFIX = ".stacks"
#: Dump of a rank's flight recorder, written if its process ends normally or with an exception.
LAST_WORDS_SUFFIX = ".last"
#: The file that requests the state of an attempt's ranks: it names the folder in the run directory for the answers, a
#: new one each time.
HANG_REQUEST = "hang-request"
HANG_FOLDER = re.compile(r"hang-\d+")
HANG_DUMP = "rank_{rank}.json"
#: The file with which a watch asks ranks of an attempt where their training threads are, a `StackRequest` as JSON, and
#: the answer of a rank.
STACK_REQUEST, STACK_SAMPLES_SUFFIX = "stack-request", ".lines"
#: Limits of a request: samples, and seconds in which they are taken.
MOST_STACK_SAMPLES, MOST_STACK_SECONDS = 1000, 60.0
#: The file in a run directory that sets which steps are recorded from now on: a `RecordingSchedule` as JSON.
CONTROL_FILE = "control.json"
#: JSON lines with samples of the state of a rank's GPU, and of its host.
GPU_SUFFIX, HOST_SUFFIX = ".gpu", ".host"


class Category(IntEnum):
    """The category of a record. `name` is the op within it."""

    COMPUTE = 1  # name: forward-compute, backward-compute, backward-weight
    P2P = 2  # name: one of the four p2p kinds; `extra`: when the wait began, ns
    # name: the collective; `peer`: number of the process group; `extra`: bytes; `chunk`: number of the fact "rows" of
    # an all-to-all; of a bucket on the host, us in which the training thread has waited for a processor so far
    COLLECTIVE = 3
    OPTIMIZER = 4
    DATA_LOAD = 5
    CHECKPOINT = 6
    GC = 7
    SPAN = 8  # name: the user's
    # From the end of the previous step to the end of this one. `extra`: ns inside computes. Of the training thread:
    # `peer`: us in which it waited for a processor, -1 if unknown; `chunk`: us in which it ran, -1
    # where a GPU times the ops.
    STEP = 9
    WAIT = 10  # name: the collective that a compute waited for; `peer`, `chunk`: as of COLLECTIVE
    EVALUATION = 11
    VALUE = 12  # name: what `tracekit.log` was given; `extra`: the bits of a float


class Flag(IntEnum):
    """Bits of a record's flags."""

    RECORDING = 1  # STEP: hooks were on
    COMPLETE = 2  # STEP: ended by an optimizer or by set_step
    LAST_BACKWARD = 4  # COMPUTE: gradients are reduced in it
    DEVICE_CLOCK = 8  # start and end (and the wait of P2P) are on the rank's device clock, else on the host's
    BLOCKING = 16  # COLLECTIVE: the call itself waited for its end
    BUCKET = 32  # COLLECTIVE: the backward that started it waits for it and copies its result


@dataclass(frozen=True)
class RecordingSchedule:
    """The steps to record: of those from `first_step` on, the first `length` of every `every`.

    Steps are numbered from 0; `last_step` is exclusive, None is open.
    """

    first_step: int = 1
    last_step: int | None = None
    every: int = 1
    length: int = 1

    def records(self, step: int) -> bool:
        """True if ops of that step are recorded."""
        if step < self.first_step or (self.last_step is not None and step >= self.last_step):
            return False
        return (step - self.first_step) % self.every < self.length

    def goes_on_after(self, step: int) -> bool:
        """True if it records further steps after that one, and then ends."""
        return self.last_step is not None and max(step + 1, self.first_step) < self.last_step

    @classmethod
    def parse(cls, text: str | bytes) -> RecordingSchedule:
        """A schedule of JSON, such as `{"first_step": 100, "last_step": 200}`. Raises ValueError for anything else."""
        try:
            content = json.loads(text)
        except RecursionError:
            raise ValueError("not a schedule, but JSON with thousands of brackets") from None
        fields = set(cls.__dataclass_fields__)
        if not isinstance(content, dict) or not set(content) <= fields:
            raise ValueError(f"not a schedule; expected an object with some of {', '.join(sorted(fields))}")
        for name, value in content.items():
            smallest = 1 if name in ("every", "length") else 0
            is_open = name == "last_step" and value is None
            if not is_open and (isinstance(value, bool) or not isinstance(value, int) or value < smallest):
                raise ValueError(f"{name} is {value!r:.40}; expected an integer of at least {smallest}")
        return cls(**content)


@dataclass(frozen=True)
class StackRequest:
    """A request of `samples` of the stacks of these ranks, evenly over `seconds`; `id` tells it from earlier ones."""

    id: int
    ranks: tuple[int, ...]
    samples: int
    seconds: float

    @classmethod
    def parse(cls, content: bytes) -> StackRequest:
        """The request in a file. Raises ValueError for anything else, TypeError for other fields."""
        request = cls(**json.loads(content))
        if not (0 < request.samples <= MOST_STACK_SAMPLES and 0 < request.seconds <= MOST_STACK_SECONDS):
            raise ValueError(f"{request.samples} samples in {request.seconds} s; expected fewer")
        return request


#: Records nothing until a user requests it.
IDLE = RecordingSchedule(first_step=1, last_step=1)


@dataclass(frozen=True)
class RuntimeOptions(RecordingSchedule):
    """What the launcher tells the ranks.

    `gpu_sample_s`: how often the state of the GPU (clock, temperature, power, throttling) is sampled; `host_sample_s`:
    that of the host (pressure, throttling). `hang_after_s`: after this long without progress, the launcher requests the
    ranks' state; 0: never. `profiler_steps`: how many steps torch.profiler records, from `first_step` on, into
    `profiler_folder`; 0: none. `keep_bytes`: size limit of a rank's segments, of which the oldest are deleted; 0: no
    limit. `buckets`: record each bucket of a reducer on the host.
    `stacks`: a watch may ask where the training thread is.
    """

    ring_capacity: int = RING_CAPACITY
    records_per_segment: int = 1 << 17
    gpu_sample_s: float = 2.0
    host_sample_s: float = 1.0
    hang_after_s: float = 0.0
    profiler_folder: str = ""
    profiler_steps: int = 0
    keep_bytes: int = 0
    buckets: bool = False
    stacks: bool = False

    @property
    def schedule(self) -> RecordingSchedule:
        """The steps to record unless a user changes that at run time."""
        return RecordingSchedule(self.first_step, self.last_step, self.every, self.length)


@dataclass(frozen=True)
class LeftOver:
    """Records that a rank had not written when it ended: whole ones, in order."""

    rank: int
    attempt: int
    process_id: int
    records: bytes


def attempt_directory(directory: Path, attempt: int) -> Path:
    """The folder of one (elastic) attempt."""
    return directory / f"attempt-{attempt:03d}"


def rank_stem(rank: int) -> str:
    """The prefix of a rank's file names."""
    return f"rank-{rank:06d}"


def segment_stem(rank: int, number: int) -> str:
    """The file name of a segment, without suffix."""
    return f"{rank_stem(rank)}-{number:08d}"


#: Where the compiled plugin is, for the rank that sets its step; unset if NCCL loads another plugin or none.
ENV_PLUGIN = "TRACEKIT_NCCL_PLUGIN"
#: The events to record, for the plugin; a number as C reads it.
ENV_MASK = "TRACEKIT_NCCL_MASK"
#: The variable that NCCL itself reads: the plugin to load.
ENV_NCCL_PLUGIN = "NCCL_PROFILER_PLUGIN"

RING_SUFFIX = ".ring"
#: Slots read from a ring while the job ran.
LOG_SUFFIX = ".slots"


class NcclEvent(IntFlag):
    """Events NCCL can report, as bits of its activation mask. Events inside an operation also activate it."""

    COLL = 1 << 1
    P2P = 1 << 2
    PROXY_OP = 1 << 3
    PROXY_STEP = 1 << 4
    KERNEL_CH = 1 << 6


#: Operations with the GPU times of their channels.
DEFAULT_MASK = NcclEvent.COLL | NcclEvent.P2P | NcclEvent.KERNEL_CH
