"""Pipeline schedules as each stage's program: computes, and calls that send and receive.

`program` returns a tuple of `Compute` and `Transfer` items in program order, as Megatron-LM's three schedules issue
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from judges.eventsim.model import Job, Posting, Schedule, Shape


@dataclass(frozen=True, slots=True)
class Compute:
    """One forward or backward of a model chunk. `number`: its place among those of its direction, from 0."""

    forward: bool
    number: int
    microbatch: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One call: outputs of computes to send and inputs of computes to receive, issued together."""

    sends: tuple[Compute, ...] = ()
    recvs: tuple[Compute, ...] = ()


Item = Compute | Transfer


def numbered(shape: Shape, number: int, *, forward: bool) -> Compute:
    """The number-th forward (or backward) of any stage: chunks take turns every pp microbatches."""
    if shape.vpp == 1:
        return Compute(forward, number, number, 0)
    turn, within = divmod(number, shape.pp * shape.vpp)
    chunk, offset = divmod(within, shape.pp)
    return Compute(forward, number, turn * shape.pp + offset, chunk if forward else shape.vpp - 1 - chunk)


def warm_up(job: Job, stage: int) -> int:
    """Number of forwards before the first backward, without the one of the steady state."""
    shape, behind = job.shape, job.shape.pp - 1 - stage
    if job.schedule is Schedule.GPIPE:
        return shape.computes
    if job.schedule is Schedule.ONE_F_ONE_B:
        return min(behind, shape.computes)
    return min(2 * behind + (shape.vpp - 1) * shape.pp, shape.computes)


def receives(shape: Shape, stage: int, compute: Compute) -> bool:
    """Whether the compute's input comes from another stage."""
    end = (0, 0) if compute.forward else (shape.pp - 1, shape.vpp - 1)
    return shape.pp > 1 and (stage, compute.chunk) != end


def sends(shape: Shape, stage: int, compute: Compute) -> bool:
    """Whether the compute's output goes to another stage."""
    end = (shape.pp - 1, shape.vpp - 1) if compute.forward else (0, 0)
    return shape.pp > 1 and (stage, compute.chunk) != end


def program(job: Job, stage: int) -> tuple[Item, ...]:
    """Program of a stage in a step, up to its last backward."""
    items = _batched(job, stage) if job.posting is Posting.BATCHED else _separate(job, stage)
    necessary: list[Item] = []
    for item in items:
        if isinstance(item, Transfer):
            sent = tuple(compute for compute in item.sends if sends(job.shape, stage, compute))
            received = tuple(compute for compute in item.recvs if receives(job.shape, stage, compute))
            if sent or received:
                necessary.append(Transfer(sent, received))
        else:
            necessary.append(item)
    return tuple(necessary)


def order(job: Job, stage: int) -> tuple[Compute, ...]:
    """The computes of a stage in order."""
    shape, warm = job.shape, warm_up(job, stage)
    steady = shape.computes - warm
    computes = [numbered(shape, number, forward=True) for number in range(warm)]
    for number in range(steady):
        computes.append(numbered(shape, warm + number, forward=True))
        computes.append(numbered(shape, number, forward=False))
    computes += [numbered(shape, number, forward=False) for number in range(steady, shape.computes)]
    return tuple(computes)


def _separate(job: Job, stage: int) -> Iterator[Item]:
    """Each receive and each send is a call of its own. Early: a receive is issued one compute ahead."""
    computes = order(job, stage)
    if job.posting is not Posting.EARLY:
        for compute in computes:
            yield Transfer(recvs=(compute,))
            yield compute
            yield Transfer(sends=(compute,))
        return
    yield Transfer(recvs=(computes[0],))
    for compute, following in zip(computes, (*computes[1:], None), strict=True):
        if following is not None:
            yield Transfer(recvs=(following,))
        yield compute
        yield Transfer(sends=(compute,))


def _batched(job: Job, stage: int) -> Iterator[Item]:
    shape, warm = job.shape, warm_up(job, stage)
    forwards = [numbered(shape, number, forward=True) for number in range(shape.computes)]
    backwards = [numbered(shape, number, forward=False) for number in range(shape.computes)]
    plan = _batched_interleaved if job.schedule is Schedule.INTERLEAVED else _batched_plain
    yield from plan(forwards, backwards, warm)


def _batched_plain(forwards: list[Compute], backwards: list[Compute], warm: int) -> Iterator[Item]:
    """Megatron's forward_backward_pipelining_without_interleaving."""
    steady = len(forwards) - warm
    for forward in forwards[:warm]:
        yield from (Transfer(recvs=(forward,)), forward, Transfer(sends=(forward,)))
    if steady:
        yield Transfer(recvs=(forwards[warm],))
    for number in range(steady):
        forward, backward = forwards[warm + number], backwards[number]
        yield from (forward, Transfer(sends=(forward,), recvs=(backward,)), backward)
        yield Transfer(sends=(backward,), recvs=tuple(forwards[warm + number + 1 : warm + number + 2]))
    for backward in backwards[steady:]:
        yield from (Transfer(recvs=(backward,)), backward, Transfer(sends=(backward,)))


def _batched_interleaved(forwards: list[Compute], backwards: list[Compute], warm: int) -> Iterator[Item]:
    """Megatron's forward_backward_pipelining_with_interleaving, without overlap of its calls."""
    steady = len(forwards) - warm
    yield Transfer(recvs=(forwards[0],))
    for number, forward in enumerate(forwards[:warm]):
        first_backward = tuple(backwards[:1]) if number == warm - 1 else ()
        yield from (forward, Transfer(sends=(forward,), recvs=(*forwards[number + 1 : number + 2], *first_backward)))
    for number in range(steady):
        forward, backward = forwards[warm + number], backwards[number]
        yield from (forward, backward)
        following = (*forwards[warm + number + 1 : warm + number + 2], *backwards[number + 1 : number + 2])
        yield Transfer(sends=(forward, backward), recvs=following)
    for number, backward in enumerate(backwards[steady:], start=steady):
        yield from (backward, Transfer(sends=(backward,), recvs=tuple(backwards[number + 1 : number + 2])))
