"""A 3-D parallel job that hangs, and the flight-recorder dumps of its ranks. Does not import tracekit.

Every rank has a program of operations. Its host issues them in order and waits for those it synchronises with; its
device executes them in order, each once all members of the group have arrived. A fault stops the host or the device, or
changes the program. Once nothing can proceed, the content of the recorders is written as PyTorch writes it.
"""

from __future__ import annotations

import json
import pickle
import random
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Kinds of faults.
FAULTS = ("host", "gone", "gpu-error", "gpu-sleep", "size", "skip", "partner")
BEGIN_NS = 1_758_580_155_000_000_000
HISTORY = 1000
RANKS_PER_HOST = 8


@dataclass(frozen=True, slots=True)
class Op:
    """`peers`: the group of a collective, or (source, target). `sync`: the host waits for it before it goes on."""

    name: str
    group: str
    peers: tuple[int, ...]
    elements: int
    sync: bool = False
    p2p: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of `rank` at `operation` of its program. `lag`: finished operations that the watchdog of a broken GPU
    has not seen.
    """

    kind: str
    rank: int
    operation: int
    lag: int = 3


@dataclass(slots=True)
class HangJob:
    """Sizes, and the groups of each rank: (description, members), in order of creation."""

    tp: int
    pp: int
    dp: int
    microbatches: int = 3
    steps: int = 2
    groups: dict[int, list[tuple[str, tuple[int, ...]]]] = field(default_factory=lambda: defaultdict(list))
    numbers: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    programs: list[list[Op]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._make_groups()
        self.programs = [self._program(rank) for rank in range(self.world)]

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tp, dp, pp) of a rank: Megatron's order."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    def rank(self, t: int, d: int, p: int) -> int:
        return t + self.tp * (d + self.dp * p)

    def _make_groups(self) -> None:
        tps, dps, pps = range(self.tp), range(self.dp), range(self.pp)
        groups = [("default_pg", tuple(range(self.world)))]
        groups += [("DATA_PARALLEL_GROUP", tuple(self.rank(t, d, p) for d in dps)) for p in pps for t in tps]
        groups += [("TENSOR_MODEL_PARALLEL_GROUP", tuple(self.rank(t, d, p) for t in tps)) for p in pps for d in dps]
        groups += [("PIPELINE_MODEL_PARALLEL_GROUP", tuple(self.rank(t, d, p) for p in pps)) for d in dps for t in tps]
        for number, group in enumerate(groups):
            self.numbers[group] = number
            for rank in group[1]:
                self.groups[rank].append(group)

    def _program(self, rank: int) -> list[Op]:
        t, d, p = self.place(rank)
        tensor = tuple(self.rank(one, d, p) for one in range(self.tp))
        data = tuple(self.rank(t, one, p) for one in range(self.dp))
        ops: list[Op] = []

        def transfer(source: int, target: int) -> None:
            ends = self.rank(t, d, source), self.rank(t, d, target)
            ops.append(Op("p2p", "PIPELINE_MODEL_PARALLEL_GROUP", ends, 4096, p2p=True))

        def compute(sync: bool) -> None:
            ops.append(Op("_all_gather_base", "TENSOR_MODEL_PARALLEL_GROUP", tensor, 4096))
            ops.append(Op("_reduce_scatter_base", "TENSOR_MODEL_PARALLEL_GROUP", tensor, 8192, sync=sync))

        for _ in range(self.steps):
            for microbatch in range(self.microbatches):
                if p > 0:
                    transfer(p - 1, p)
                compute(sync=microbatch % 2 == 1)
                if p < self.pp - 1:
                    transfer(p, p + 1)
            for _ in range(self.microbatches):
                if p < self.pp - 1:
                    transfer(p + 1, p)
                compute(sync=False)
                if p > 0:
                    transfer(p, p - 1)
            ops.append(Op("_reduce_scatter_base", "DATA_PARALLEL_GROUP", data, 100_000))
            ops.append(Op("all_reduce", "default_pg", tuple(range(self.world)), 1, sync=True))
            ops.append(Op("_all_gather_base", "DATA_PARALLEL_GROUP", data, 50_000))
        return ops


@dataclass(slots=True)
class HangOutcome:
    """The final state of a job: operations issued, done, and seen as done, per rank.

    `struck`: the faults that were reached; a rank may wait forever before it reaches others.
    """

    programs: list[list[Op]]
    issued: list[int]
    done: list[int]
    seen: list[int]
    struck: list[Fault]

    def hangs(self) -> bool:
        return any(done < len(program) for done, program in zip(self.done, self.programs, strict=True))


def run(job: HangJob, faults: list[Fault]) -> HangOutcome:
    """Run the job until nothing can proceed."""
    programs = [list(program) for program in job.programs]
    host_stop = [len(program) for program in programs]
    device_stop = list(host_stop)
    never: set[tuple[int, int]] = set()
    for fault in faults:
        program = programs[fault.rank]
        if fault.kind in {"host", "gone"}:
            host_stop[fault.rank] = fault.operation
        elif fault.kind in {"gpu-error", "gpu-sleep"}:
            device_stop[fault.rank] = fault.operation
        elif fault.kind in {"skip", "partner"}:
            del program[fault.operation]
            host_stop[fault.rank] = device_stop[fault.rank] = len(program)
        else:
            op = program[fault.operation]
            program[fault.operation] = Op(op.name, op.group, op.peers, op.elements * 2, op.sync, op.p2p)
            never.add((fault.rank, fault.operation))
    keys = [_keys(program) for program in programs]
    issued, done = [0] * job.world, [0] * job.world
    arrived: defaultdict[Any, list[int]] = defaultdict(list)
    blocked: set[Any] = {keys[rank][at] for rank, at in never}
    at_op = [-1] * job.world
    todo = list(range(job.world))
    while todo:
        rank = todo.pop()
        program = programs[rank]
        while True:
            number = done[rank]
            limit = next((i + 1 for i in range(number, len(program)) if program[i].sync), len(program))
            issued[rank] = max(issued[rank], min(limit, host_stop[rank]))
            if number >= issued[rank] or number >= device_stop[rank] or at_op[rank] == number:
                break
            at_op[rank] = number
            key, op = keys[rank][number], program[number]
            waiting = arrived[key]
            waiting.append(rank)
            names = {programs[one][done[one]].name for one in waiting}
            if len(waiting) < len(op.peers) or key in blocked or len(names) > 1:
                break
            for member in waiting:
                done[member] += 1
            todo.extend(one for one in waiting if one != rank)
    seen, struck = list(done), []
    for fault in faults:
        rank, program = fault.rank, programs[fault.rank]
        reached = done[rank]
        if reached < fault.operation and (fault.kind != "gone" or issued[rank] < fault.operation):
            continue
        struck.append(fault)
        if fault.kind == "gpu-error":
            seen[rank] = max(reached - fault.lag, 0)
    return HangOutcome(programs, issued, done, seen, struck)


def _keys(program: list[Op]) -> list[Any]:
    counts: defaultdict[Any, int] = defaultdict(int)
    keys = []
    for op in program:
        base = op.group, op.peers, op.p2p
        keys.append((*base, counts[base]))
        counts[base] += 1
    return keys


def dumps(
    job: HangJob,
    faults: list[Fault],
    outcome: HangOutcome,
    *,
    version: str = "2.9",
    timing: bool = False,
    cut: int | None = None,
    status: bool = True,
) -> dict[int, dict[str, Any]]:
    """The dump of each rank that can still write. `cut`: members listed per group. `status`: include group status."""
    gone = {fault.rank for fault in faults if fault.kind == "gone"}
    stopped = {fault.rank for fault in outcome.struck if fault.kind in {"gpu-error", "gpu-sleep"}}
    return {
        rank: _dump(job, outcome, rank, version, timing, cut, status, rank in stopped)
        for rank in range(job.world)
        if rank not in gone
    }


def _dump(
    job: HangJob,
    outcome: HangOutcome,
    rank: int,
    version: str,
    timing: bool,
    cut: int | None,
    status: bool,
    stopped: bool,
) -> dict[str, Any]:
    program, issued, seen = outcome.programs[rank], outcome.issued[rank], outcome.seen[rank]
    skew = zlib.crc32(b"%d" % (rank // RANKS_PER_HOST)) % 300_000_000
    config, numbers, stated = {}, {}, {}
    for place, group in enumerate(job.groups[rank]):
        name = str(job.numbers[group])
        numbers[group[0]] = place, name, group[1]
        config[name] = {"name": name, "desc": group[0], "ranks": _ranks(group[1], cut)}
        stated[str(place)] = {"last_enqueued_collective": HISTORY, "last_started_collective": -1}
        stated[str(place)]["last_completed_collective"] = HISTORY
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [HISTORY, HISTORY])
    entries = []
    for number, op in enumerate(program[:issued]):
        place, name, members = numbers[op.group]
        counts[op.group][op.p2p] += 1
        sequence = counts[op.group][op.p2p]
        stated[str(place)]["last_enqueued_collective"] = sequence
        if number < seen:
            stated[str(place)]["last_completed_collective"] = sequence
            continue
        title = op.name
        if op.p2p:
            ends = [members.index(one) for one in op.peers]
            title = f"send {ends[0]}->{ends[1]}" if op.peers[0] == rank else f"recv {ends[1]}<-{ends[0]}"
        started = timing and number < outcome.done[rank] + (not stopped)
        entries.append(
            {
                "record_id": 70_000 + number,
                "pg_id": place,
                "process_group": (name, op.group),
                "collective_seq_id": counts[op.group][0],
                "p2p_seq_id": counts[op.group][1] if op.p2p else 0,
                "op_id": sequence,
                "profiling_name": f"nccl:{title}",
                "time_created_ns": BEGIN_NS + skew + number * 1_000_000,
                "input_sizes": [[op.elements, 1]],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [[op.elements, 1]],
                "output_dtypes": ["BFloat16"],
                "state": "started" if started else "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": False,
                "timeout_ms": 180_000,
                "is_p2p": op.p2p,
            }
        )
    dump = {"version": version, "pg_config": config, "nccl_version": "2.27.3", "entries": entries}
    if status:
        dump["pg_status"] = stated
    return dump


def _ranks(members: tuple[int, ...], cut: int | None) -> str:
    if cut is None or len(members) <= cut:
        return str(list(members))
    return f"[{', '.join(map(str, members[:cut]))}, ...]"


def write(folder: Path, content: dict[int, dict[str, Any]], *, as_json: bool = False) -> None:
    """One file per rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in content.items():
        if as_json:
            (folder / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(dump))
        else:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def draw_faults(job: HangJob, kind: str, count: int, random_: random.Random) -> list[Fault]:
    """Faults of one kind on different ranks, at fitting operations in the second half of the programs."""
    ranks = random_.sample(range(job.world), count)
    return [Fault(kind, rank, _spot(job.programs[rank], kind, rank, random_), random_.randint(1, 6)) for rank in ranks]


def _spot(program: list[Op], kind: str, rank: int, random_: random.Random) -> int:
    fits = {
        "size": lambda op: not op.p2p and len(op.peers) > 1,
        "skip": lambda op: op.name == "_all_gather_base" and op.group.startswith("TENSOR"),
        "partner": lambda op: op.p2p and op.peers[1] == rank,
    }.get(kind)
    spots = [at for at in range(len(program) // 2, len(program) - 4) if fits is None or fits(program[at])]
    return random_.choice(spots or [len(program) // 2])
