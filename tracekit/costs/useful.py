"""What a source shows to be useful.

In: a report. Out: what the step goes to that no loss has, in the order in which it is charged. What a source does not
show to be useful is unknown, with the reason.
"""

from __future__ import annotations

from statistics import median

from tracekit.costs.parts import ALL, USEFUL, BillPart, Claim
from tracekit.report.gpu import GpuInReport
from tracekit.report.report import Report
from tracekit.report.verdict import LossKind
from tracekit.trace.facts import Fact
from tracekit.trace.gpu_activity import KernelClass

#: Losses of post-training inside its generation.
_OF_GENERATION = frozenset((LossKind.QUEUEING, LossKind.TAIL, LossKind.ENGINES, LossKind.TOOLS))


def shown_useful(report: Report, losses: dict[LossKind, float], others: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """What the rest of the mean step of a trusted report goes to, beyond its losses, seconds by kind.

    `others`: what causes cost whose losses the verdict does not count, because they may share their time with it.
    """
    lack = next((lack for lack in report.lacks if lack.fact is Fact.COMPUTE), None)
    if lack is not None:
        return (*others, (BillPart.UNKNOWN, lack.why, ALL))
    match report.job.source:
        case "recording":
            return _of_recording(report, losses, others)
        case "rl":
            return _of_post_training(report, losses, others)
        case _:
            return _of_ops(report, others)


def _of_ops(report: Report, others: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """Of pipelines and op traces, whose ops are the work: all but the delays between ops."""
    delays_s = max(report.trust.unexplained or 0.0, 0.0) * report.step_time_s.original
    return (*others, (BillPart.UNKNOWN, "launch delays without a cause", delays_s), USEFUL)


def _of_recording(report: Report, losses: dict[LossKind, float], others: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """Of a recording of GPUs, the time in which they compute; the median rank, as a straggler computes more."""
    gpus = report.gpu_of_ranks
    wasted_s = losses.get(LossKind.COMPUTE, 0.0) + sum(
        seconds for part, _, seconds in others if part is BillPart.COMPUTE
    )
    computed_s = max(median(map(_computed_s, gpus)) - wasted_s, 0.0) if gpus else 0.0
    exposed_s = max(report.verdict.exposed_communication_s or 0.0, 0.0)
    if LossKind.COMMUNICATION in losses or any(part is BillPart.COMMUNICATION for part, *_ in others):
        exposed_s = 0.0
    return (
        (*USEFUL[:2], computed_s),
        *others,
        (BillPart.COMMUNICATION, "exposed-communication", exposed_s),
        (BillPart.UNKNOWN, "the profiler's own cost", _recording_s(report, gpus)),
        (BillPart.UNKNOWN, "no GPU computes, for no known loss", ALL),
    )


def _recording_s(report: Report, gpus: list[GpuInReport]) -> float:
    """What recording cost of the whole recording, at least: that of the rank that it cost least."""
    steps = [gpu.unprofiled for gpu in gpus if gpu.unprofiled is not None and gpu.unprofiled.profiled_step_s > 0]
    shares = [step.overhead_s / step.profiled_step_s for step in steps]
    return max(min(shares, default=0.0), 0.0) * report.step_time_s.recorded


def _computed_s(gpu: GpuInReport) -> float:
    kernels_s = sum(kernel.seconds for kernel in gpu.kernels if kernel.of_class != KernelClass.COMMUNICATION)
    return min(kernels_s, gpu.busy_s)


def _of_post_training(report: Report, losses: dict[LossKind, float], others: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """Of trajectories, what engines decode; a log says how long phases last, not what GPUs do in them."""
    decoded_s = 0.0
    if report.job.basis == "trajectories":
        inside_s = sum(seconds for kind, seconds in losses.items() if kind in _OF_GENERATION)
        inside_s += sum(seconds for _, kind, seconds in others if kind in _OF_GENERATION)
        decoded_s = max((report.generation_s or 0.0) - inside_s, 0.0)
    return (
        *others,
        (BillPart.UNKNOWN, "in no phase", report.unaccounted_s or 0.0),
        (BillPart.USEFUL, "generation", decoded_s),
        (BillPart.UNKNOWN, "phases: the log shows no compute", ALL),
    )
