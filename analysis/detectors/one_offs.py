"""Stalls that were seen in one or two steps only: a freeze, a burst, a late batch, of few ranks or of all.

Not one of `DETECTORS`: these are findings of the kinds that the same trouble has in every step, with their steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tracekit.analysis.attribution.patterns import PATTERNS, TimePattern, TimeShape
from tracekit.analysis.detectors.detector import FINDINGS, Advice, Candidate
from tracekit.analysis.evidence.one_offs import OneOff, WorkPart, one_offs_of
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.subject import listed
from tracekit.base.text import seconds, steps_text
from tracekit.report.finding import Figure, Place, Unit, confidence_from

_COMES_BACK = "record more steps to see whether it comes back"
#: Of each part: what it is called in a sentence, and what to look at.
_WORDS: Mapping[WorkPart, tuple[str, str]] = {
    WorkPart.COMPUTE: ("computes", "the system log (dmesg), throttling, other processes"),
    WorkPart.DATA: ("data loading", "the data loader and the storage that it reads from"),
    WorkPart.OPTIMIZER: ("optimizer", "what the script does around its optimizer: logging, saving, offloading"),
    WorkPart.HOST: ("host code between ops", "what the script did: its own log, logging, saving, evaluation"),
    WorkPart.COLLECTION: ("garbage collection", "what made Python collect: gc.callbacks with a timer"),
    WorkPart.NETWORK: ("transfers", "counters of network cards and switches (port flaps, ECN and PFC counters)"),
}
#: What detectors look for in a part although it is in few steps.
_EXPLAINED_BY: Mapping[WorkPart, frozenset[str]] = {
    WorkPart.COMPUTE: frozenset({"slow-steps"}),
    WorkPart.NETWORK: frozenset({"congestion", "slow-nic", "slow-p2p-link"}),
}
_PLURAL = frozenset({WorkPart.COMPUTE, WorkPart.NETWORK})


def one_off_stalls(job: PipelineSubject, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield what stands apart in one or two steps, but for what a candidate explains that expects single slow steps, or
    single long transfers.
    """
    for one_off in one_offs_of(job):
        kinds = _EXPLAINED_BY.get(one_off.part, frozenset())
        if not any(each.kind in kinds and _explains(job, each, one_off) for each in candidates):
            yield _stall(job, one_off)


def _explains(job: PipelineSubject, candidate: Candidate, one_off: OneOff) -> bool:
    """Whether a candidate costs most of what stands apart in its steps."""
    steps = list(one_off.steps)
    saved_s, costs_s = (
        float((job.unchanged - job.step_times((change,)))[steps].sum()) if change is not None else 0.0
        for change in (candidate.change, one_off.change)
    )
    return saved_s >= FINDINGS.most_of_price * costs_s


def _stall(job: PipelineSubject, one_off: OneOff) -> Candidate:
    steps = tuple(int(job.steps[place]) for place in one_off.steps)
    workers = () if one_off.everywhere else job.workers_where(one_off.workers)
    figures = (
        Figure("longer than usual, over the step", _share(job, one_off), PATTERNS.longer_share, Unit.SHARE),
        Figure("beyond what any other step is longer", one_off.factor, 1 / PATTERNS.share_of_another, Unit.FACTOR),
    )
    in_steps = _in_words(steps)
    advice = f"see what happened on {{ranks}} in {in_steps}: {_WORDS[one_off.part][1]}; {_COMES_BACK}"
    strength = float(one_off.extra_s.max()) / job.unchanged_s
    return Candidate(
        _kind(one_off),
        Place(workers=workers, steps=steps),
        _effect(one_off, in_steps),
        figures,
        confidence_from(figures[1:]),
        one_off.change,
        time=TimePattern(TimeShape.TRANSIENT, strength, 0.0, None, None, steps),
        title=f"Stall in {in_steps} alone",
        next_check=f"a timeline of {in_steps} (`tracekit store export`), and the logs of that time",
        suggested_fix=Advice(gpu=advice.replace("(dmesg)", "(dmesg: Xid errors)"), cpu=advice),
        one_off=True,
        signature="one or two steps in which work takes far longer than in any other step of any worker",
        refuted_by="a longer recording in which it comes back",
    )


def _share(job: PipelineSubject, one_off: OneOff) -> float:
    """How much longer its steps take the longest worker, over all steps."""
    return float(one_off.extra_s.sum()) / (job.unchanged_s * len(job.steps))


def _kind(one_off: OneOff) -> str:
    """The kind of finding that this is if it returns."""
    match one_off.part:
        case WorkPart.COMPUTE:
            if not one_off.all_slow:
                return "process-pauses"
            return "slow-steps" if one_off.everywhere else "bad-worker"
        case WorkPart.DATA:
            return "late-data-loading"
        case WorkPart.OPTIMIZER:
            return "slow-optimizer"
        case WorkPart.HOST:
            return "host-bound-launch" if one_off.everywhere else "slow-host-code"
        case WorkPart.COLLECTION:
            return "python-gc"
        case WorkPart.NETWORK:
            return "congestion"


def _effect(one_off: OneOff, in_steps: str) -> str:
    longer = f"{'up to ' * (len(one_off.steps) > 1)}{seconds(float(one_off.extra_s.max()))} longer in {in_steps}"
    return f"{_what_takes(one_off)} {longer} than in other steps"


def _what_takes(one_off: OneOff) -> str:
    """The work that takes longer, with its verb; of workers that are the subject of the sentence, or of all ranks."""
    words = listed(_WORDS[part][0] for part in one_off.parts)
    takes = "take" if len(one_off.parts) > 1 or one_off.part in _PLURAL else "takes"
    if one_off.part is WorkPart.NETWORK:
        return f"{words} {takes}"
    if one_off.everywhere:
        return f"{words} of {'all' if one_off.workers.all() else 'most'} ranks {takes}"
    whose = "its" if one_off.workers.sum() == 1 else "their"
    if one_off.ops == 1 and one_off.parts == (WorkPart.COMPUTE,):
        return f"one of {whose} computes takes"
    return f"{whose} {words} {takes}"


def _in_words(steps: tuple[int, ...]) -> str:
    in_a_row = steps[-1] - steps[0] == len(steps) - 1
    return steps_text(steps[0], steps[-1]) if in_a_row else f"steps {listed(steps)}"
