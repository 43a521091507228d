"""What a fix really gives back: the fixed job, simulated with the same seed, beside the predicted price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tests.analysis.causes.corpus import recorded_s
from tracekit.analysis.attribution.attribute import attribute
from tracekit.analysis.diagnosis.find import causes_of
from tracekit.analysis.diagnosis.of_pipeline import PipelineAssessment
from tracekit.analysis.diagnosis.price import PricedFix, fixes_of
from tracekit.analysis.evidence.computes import Computes
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.fixes import deal_job, dealt_cost
from tracekit.analysis.numeric.arrays import Ints
from tracekit.analysis.replay.engine import JobReplay
from tracekit.synth import (
    FlappingNetwork,
    InjectedCause,
    LateDataLoading,
    PythonGc,
    Schedule,
    SequenceLengthImbalance,
    SlowHost,
    SlowLastStage,
    SlowNic,
    SlowP2pLink,
    SlowSteps,
    SlowWorker,
    SynthSpec,
    synthesize,
)
from tracekit.synth.injected_causes import Floats, JobShape
from tracekit.trace.model import Layout

#: What goes when the fix is made.
CURES: dict[str, tuple[type[InjectedCause], ...]] = {
    "replace-workers": (SlowWorker, SlowHost),
    "drain-host": (SlowHost,),
    "planned-gc": (PythonGc,),
    "steady-steps": (SlowSteps,),
    "repair-link": (SlowP2pLink,),
    "repair-nic": (SlowNic,),
    "calm-network": (FlappingNetwork,),
    "prefetch-data": (LateDataLoading,),
}
SHAPES = (
    (Layout(dp=4, pp=4, tp=4), Schedule.ONE_F_ONE_B, 8),
    (Layout(dp=6, pp=2, tp=4), Schedule.ONE_F_ONE_B, 6),
    (Layout(dp=4, pp=4, vpp=2, tp=4), Schedule.INTERLEAVED, 8),
    (Layout(dp=4, pp=3, tp=8), Schedule.GPIPE, 6),
)
INJECTED: tuple[tuple[InjectedCause, ...], ...] = (
    (SlowWorker(factor=1.5),),
    (SlowWorker(factor=2.5),),
    (SlowHost(factor=1.5),),
    (SlowLastStage(factor=1.5),),
    (SlowLastStage(factor=2.0),),
    (SequenceLengthImbalance(quadratic_share=0.4),),
    (SequenceLengthImbalance(quadratic_share=0.8),),
    (PythonGc(pause_s=0.3, rate=0.1),),
    (SlowP2pLink(factor=60),),
    (SlowNic(factor=6),),
    (FlappingNetwork(rate=0.01, factor=300),),
    (LateDataLoading(delay_s=0.3),),
    (SlowSteps(factor=1.6),),
    (SlowWorker(factor=1.6), PythonGc(pause_s=0.3, rate=0.1)),
    (SlowLastStage(factor=1.5), SequenceLengthImbalance(quadratic_share=0.4)),
    (SlowP2pLink(factor=60), SlowNic(factor=6)),
    (SlowWorker(factor=1.6), LateDataLoading(delay_s=0.2)),
)


@dataclass(frozen=True, slots=True)
class Dealt(SequenceLengthImbalance):
    """The same sequences, dealt over the DP ranks as a fix proposes. `deal`: as `deal_job` returns it."""

    deal: Ints | None = None

    def factor(self, job: JobShape, rng: np.random.Generator) -> Floats:
        cost = SequenceLengthImbalance.factor(self, job, rng)
        dealt = dealt_cost(cost.reshape(job.microbatches, job.steps, job.layout.dp_ranks), self.deal)
        return dealt.reshape(job.microbatches, -1)


@dataclass(frozen=True)
class Checked:
    """A fix's predicted step and the simulated one, seconds."""

    fix: PricedFix
    spec: SynthSpec
    truth_s: float

    @property
    def error(self) -> float:
        return abs(self.fix.new_step_s / self.truth_s - 1)


def truth_of(fix: PricedFix, spec: SynthSpec, evidence: PipelineSubject) -> float | None:
    """Step time of the job simulated with the fix made; None where the simulator cannot make it."""
    if fix.kind in CURES:
        cured = tuple(cause for cause in spec.causes if not isinstance(cause, CURES[fix.kind]))
        extra_s = fix.details["pause_s"] / fix.details["every_steps"] if fix.kind == "planned-gc" else 0.0
        return _simulated(replace(spec, causes=cured)) + extra_s
    if "layers_then" in fix.details:
        return _simulated(replace(spec, layers=tuple(fix.details["layers_then"])))
    if fix.kind == "balance-sequences":
        deal = deal_job(evidence.profile.microbatch)
        dealt = tuple(
            Dealt(cause.quadratic_share, deal) if isinstance(cause, SequenceLengthImbalance) else cause
            for cause in spec.causes
        )
        return _simulated(replace(spec, causes=dealt))
    if fix.kind == "compress-dp-communication":
        ratio, costs = fix.details["ratio"], spec.costs
        less = replace(
            costs,
            all_gather_s=costs.all_gather_s / ratio,
            reduce_scatter_s=costs.reduce_scatter_s / ratio,
            separate_s=costs.separate_s / ratio,
        )
        return _simulated(replace(spec, costs=less))
    return None


def _simulated(spec: SynthSpec) -> float:
    return recorded_s(synthesize(spec))


def checked_fixes(first_seed: int, repeats: int) -> Iterator[Checked]:
    """Every fix proposed for jobs of every cause over shapes, with the truth where the simulator knows it."""
    seed = first_seed
    for _ in range(repeats):
        for causes in INJECTED:
            layout, schedule, microbatches = SHAPES[seed % len(SHAPES)]
            spec = SynthSpec(
                layout=layout,
                schedule=schedule,
                microbatches=microbatches,
                steps=10,
                overlap_dp=seed % 3 == 0,
                seed=seed,
                noise=(0.01, 0.03)[seed % 2],
                causes=causes,
                layers=(8,) * layout.pp,
            )
            seed += 1
            yield from checked_job(spec)


def checked_job(spec: SynthSpec) -> Iterator[Checked]:
    """The fixes of one job against the truth."""
    trace = synthesize(spec)
    replay = JobReplay.from_trace(trace)
    evidence = PipelineSubject(trace, replay, replay, partial(attribute, replay), Computes(replay))
    assessed = PipelineAssessment(evidence)
    for fix in fixes_of(assessed, causes_of(assessed)):
        truth_s = truth_of(fix, spec, evidence)
        if truth_s is not None:
            yield Checked(fix, spec, truth_s)
