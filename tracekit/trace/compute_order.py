"""The order in which the stages of a pipeline compute: GPipe, 1F1B, interleaved 1F1B.

In: a schedule, the layout and the number of microbatches. Out: the computes of a stage in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tracekit.base.errors import LayoutError
from tracekit.trace.model import Layout


class Schedule(StrEnum):
    """The order in which a stage computes forwards and backwards."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True)
class Compute:
    """One forward or backward compute of a stage."""

    forward: bool
    microbatch: int
    chunk: int


def check_schedule(schedule: Schedule, layout: Layout, microbatches: int) -> None:
    """Raise LayoutError if the schedule cannot run in that layout."""
    if schedule is not Schedule.INTERLEAVED:
        if layout.vpp > 1:
            raise LayoutError(
                f"schedule {schedule} has one model chunk per stage, but the layout says vpp {layout.vpp}; use"
                f" {Schedule.INTERLEAVED} or vpp 1"
            )
        return
    if layout.vpp < 2:
        raise LayoutError(f"schedule {schedule} needs at least 2 model chunks per stage; set vpp to 2 or more")
    if microbatches % layout.pp:
        groups = microbatches // layout.pp
        near = sorted({max(1, groups) * layout.pp, (groups + 1) * layout.pp})
        raise LayoutError(
            f"schedule {schedule} runs microbatches in groups of pp: {microbatches} is not a multiple of pp"
            f" {layout.pp}; use {' or '.join(map(str, near))}"
        )


def compute_order(schedule: Schedule, layout: Layout, microbatches: int, stage: int) -> tuple[Compute, ...]:
    """The computes of a stage in order.

    1F1B warms up with pp - stage - 1 forwards, interleaved 1F1B with 2 (pp - stage - 1) + (vpp - 1) pp and switches
    the model chunk every pp microbatches (Megatron-LM's schedules); GPipe runs all forwards first.
    """
    total = microbatches * layout.vpp
    later_stages = layout.pp - stage - 1
    match schedule:
        case Schedule.GPIPE:
            warm_up = total
        case Schedule.ONE_F_ONE_B:
            warm_up = later_stages
        case Schedule.INTERLEAVED:
            warm_up = 2 * later_stages + (layout.vpp - 1) * layout.pp
    warm_up = min(warm_up, total)
    order = [_compute(position, layout, forward=True) for position in range(warm_up)]
    for number in range(total - warm_up):
        order.append(_compute(warm_up + number, layout, forward=True))
        order.append(_compute(number, layout, forward=False))
    order += [_compute(position, layout, forward=False) for position in range(total - warm_up, total)]
    return tuple(order)


def _compute(number: int, layout: Layout, *, forward: bool) -> Compute:
    """The at-th forward (or backward) of every stage."""
    if layout.vpp == 1:
        return Compute(forward, number, 0)
    turn, position = divmod(number, layout.pp * layout.vpp)
    chunk = position // layout.pp
    return Compute(forward, turn * layout.pp + position % layout.pp, chunk if forward else layout.vpp - 1 - chunk)
