"""What a bill reads of a report: its losses, its causes, and what its source recorded.

In: the JSON of a report. Out: `Reported`.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from tracekit.report.finding import Place
from tracekit.report.verdict import LossKind
from tracekit.trace.facts import Lack


class Times(Struct, frozen=True):
    """Seconds of the mean step, or of the whole recording."""

    recorded: float
    original: float
    ideal: float


class Loss(Struct, frozen=True):
    """What one kind of loss costs, seconds."""

    kind: LossKind
    lost_s: float


class Verdict(Struct, frozen=True):
    """The losses, those that lead first. `lost_s`: of all together."""

    lost_s: float
    losses: list[Loss]
    exposed_communication_s: float = 0.0


class Cause(Struct, frozen=True):
    """A finding and its price, seconds: alone, and once all others are gone."""

    kind: str
    where: Place
    saved_s: float
    alone_s: float


class OnPath(Struct, frozen=True):
    """Seconds of a kind of op on the critical path; `kind` is None between ops."""

    recorded_s: float
    kind: str | None = None


class OfKind(Struct, frozen=True):
    """S with the ops of a kind alone as recorded, None if that takes no time."""

    kind: str | None = None
    slowdown: float | None = None


class Trust(Struct, frozen=True):
    """`unexplained`: the share that launch delays without a named cause add to the step."""

    trustworthy: bool
    reasons: list[str]
    unexplained: float | None = None


class Kernel(Struct, frozen=True):
    """GPU ops of one name, seconds in all."""

    seconds: float
    of_class: str = field(name="class")


class ProfiledStep(Struct, frozen=True):
    """Seconds of a step as a profiler recorded it, and what of them recording cost."""

    profiled_step_s: float
    overhead_s: float


class Gpu(Struct, frozen=True):
    """What the GPU of a rank did, seconds. `unprofiled`: None if it is not known what recording cost."""

    busy_s: float
    kernels: list[Kernel]
    unprofiled: ProfiledStep | None = None


class RlRun(Struct, frozen=True):
    """`basis`: `trajectories`, or `phases` alone."""

    basis: str


class Rl(Struct, frozen=True):
    """Seconds of the mean step of post-training. `length_s`: of all steps together."""

    job: RlRun
    generation_s: float | None = None
    unaccounted_s: float | None = None
    length_s: float | None = None


class Job(Struct, frozen=True):
    """`source`: `pipeline`, `ops`, `recording` or `rl`. `gpus`: of the whole job."""

    source: str
    gpus: int


class Reported(Struct, frozen=True):
    """The parts of a report that a bill reads."""

    job: Job
    step_time_s: Times
    verdict: Verdict
    trust: Trust
    causes: list[Cause]
    critical_path: list[OnPath]
    by_kind: list[OfKind]
    critical_kinds: list[OnPath] | None = None
    rl: Rl | None = None
    gpu: Gpu | None = None
    gpus: list[Gpu] = []
    lacks: list[Lack] = []


def read_report(report: str) -> Reported | None:
    """The parts of a report that a bill reads; None for one of a version with other keys."""
    try:
        return msgspec.json.decode(report, type=Reported)
    except msgspec.DecodeError:
        return None
