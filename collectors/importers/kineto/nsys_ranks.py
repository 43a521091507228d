"""Which rank each event in an export of Nsight Systems belongs to.

In: tables of GPU ops, calls, ranges and calls of NCCL. Out: `Ranks`. Each GPU that a process uses is a rank: by what
NCCL says, else by the number of the GPU, else in the order of GPUs and processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracekit.collectors.importers.kineto.event_tables import NO_ID, Ints, Table

#: A process with a smaller share of its GPU ops on the GPU of another process has no rank there.
_STRAY = 0.01
#: More than the number of any GPU, and than any number of a launch.
_GPUS, _LAUNCHES = 1 << 20, 1 << 40
#: A process, and its number of a GPU.
User = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Numbers of ranks, -1 for none. `of_op`: [GPU ops]; `of_nccl`: [calls of NCCL]. `of_thread`: the ranks whose GPU
    ops a thread launched; if it launched none, all of its process. `launch`: the row of the call of each GPU op, -1 if
    it was not recorded. `world_size`: of the job; None if NCCL does not say it, and then the numbers are guesses.
    """

    of_op: Ints
    of_nccl: Ints
    of_thread: Mapping[int, Sequence[int]]
    launch: Ints
    world_size: int | None


def ranks_of_events(gpu: Table, calls: Table, ranges: Table, nccl: Table, gpus: Mapping[User, int]) -> Ranks:
    """Find the ranks. `process` of the tables: -1 if there is only one.

    `gpus`: the number of the GPU that a process, by its id, knows by a number of its own.
    """
    users, user = _users(gpu["process"], gpu["device"])
    stated, size = _stated(users, nccl)
    number = _by_gpu(users, gpus) if stated is None else stated
    rank = np.array([number[one] for one in users])[user]
    launch = matched(gpu["process"], gpu["correlation"], calls["process"], calls["correlation"])
    launched = launch >= 0
    of_thread = _by_first(calls["thread"][launch[launched]], rank[launched])
    of_process: dict[int, list[int]] = {}
    for (process, _), rank_number in number.items():
        of_process.setdefault(process, []).append(rank_number)
    for table in (calls, ranges, nccl):
        for thread in np.unique(table["thread"]).tolist():
            of_thread.setdefault(thread, of_process.get(NO_ID, of_process.get(thread >> 24, [])))
    of_nccl = []
    for thread, process, device in np.stack([nccl["thread"], nccl["process"], nccl["device"]]).T.tolist():
        only = of_thread[thread][0] if len(of_thread[thread]) == 1 else NO_ID
        of_nccl.append(number.get((process, device), only))
    return Ranks(rank, np.array(of_nccl, np.int64), of_thread, launch, None if stated is None else size)


def matched(process: Ints, number: Ints, other: Ints, number_of_other: Ints) -> Ints:
    """Return the first row of the others with the same process and number, -1 for none, [numbers]."""
    if not len(other):
        return np.full(len(process), NO_ID)
    processes = np.unique(np.concatenate([process, other]))
    wanted = np.searchsorted(processes, process) * _LAUNCHES + number
    keys = np.searchsorted(processes, other) * _LAUNCHES + number_of_other
    order = np.argsort(keys, kind="stable")
    row = order[np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)]
    return np.where((keys[row] == wanted) & (number != NO_ID), row, NO_ID)


def _users(process: Ints, device: Ints) -> tuple[list[User], Ints]:
    """Return each process with each of its GPUs, and which of these each GPU op is of.

    What a process does on the GPU of another one, such as before it chose its own, counts for its own.
    """
    keys, user = np.unique(process * _GPUS + device + 1, return_inverse=True)
    users = [(key // _GPUS, key % _GPUS - 1) for key in keys.tolist()]
    count = np.bincount(user).tolist()
    home = {users[one][0]: one for one in sorted(range(len(users)), key=count.__getitem__)}
    home_gpus = {users[one][1] for one in home.values()}
    for index, (owner, gpu) in enumerate(users):
        if home[owner] != index and gpu in home_gpus and count[index] < _STRAY * count[home[owner]]:
            user[user == index] = home[owner]
    remaining, user = np.unique(user, return_inverse=True)
    return [users[one] for one in remaining.tolist()], user


def _stated(users: Sequence[User], nccl: Table) -> tuple[dict[User, int] | None, int]:
    """Return the rank of each user in the largest communicator that was made, None if some lack one; and its size."""
    size = int(nccl["size"].max(initial=0))
    creations = np.flatnonzero((nccl["size"] == size) & (nccl["rank"] >= 0))
    ranks = {
        (process, device): rank
        for process, device, rank in np.stack(
            [nccl[name][creations] for name in ("process", "device", "rank")]
        ).T.tolist()
    }
    stated = {one: ranks[one] for one in users if one in ranks}
    return stated if len(set(stated.values())) == len(users) else None, size


def _by_gpu(users: Sequence[User], gpus: Mapping[User, int]) -> dict[User, int]:
    """Number the users by GPU; one alone is 0, as in a file of torch.profiler that does not state its rank."""
    seen = [device for _, device in users]
    real = [gpus.get((process & 0xFFFFFF, device), device) for process, device in users]
    for numbers in (seen, real):
        if len(set(numbers)) == len(users) > 1 and min(numbers) >= 0:
            return dict(zip(users, numbers, strict=True))
    order = sorted(range(len(users)), key=lambda index: (real[index], users[index]))
    return {users[one]: place for place, one in enumerate(order)}


def _by_first(first: Ints, second: Ints) -> dict[int, Sequence[int]]:
    """Return what is paired with each first number."""
    distinct, which = np.unique(first, return_inverse=True)
    count = int(second.max(initial=0)) + 1
    paired: dict[int, list[int]] = {}
    for pair in np.unique(which * count + second).tolist():
        paired.setdefault(int(distinct[pair // count]), []).append(pair % count)
    return dict(paired)
