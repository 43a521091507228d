"""Precision, recall and prices of the diagnosis on synthetic jobs, and its time on large ones."""

from collections import defaultdict

import numpy as np

from benchmarks.measure import median_s, table
from tests.analysis.causes.corpus import NOISE, SHAPES, WORKER_SPREAD, Score, score
from tests.analysis.causes.disturbed import disturbed, one_worker, real_noise
from tests.analysis.evidence.test_compute_profile import SHAPES as FEW_PEERS
from tests.analysis.evidence.test_compute_profile import job_of
from tests.analysis.fixes.price_truth import checked_fixes
from tracekit.analysis.evidence.compute_profile import BACKWARD, FORWARD, profile_computes
from tracekit.analysis.graph.op_grid import ComputeTable
from tracekit.analysis.replay.engine import JobReplay

#: Published figures come from these seeds, so choose thresholds on other ones.
CORPUS_SEED, REPEATS, HEALTHY = 9_100_000, 6, 150
PRICE_SEED, PRICE_REPEATS = 9_500_000, 8
NOISE_JOBS = 40
QUICK = {"REPEATS": 1, "HEALTHY": 2, "PRICE_REPEATS": 1, "NOISE_JOBS": 1, "WORKERS": (32,)}
PP, MICROBATCHES, STEPS = 16, 32, 10
WORKERS = (512, 2048, 8192)


def section() -> str:
    """The Markdown of this section."""
    return "\n\n".join(["## Diagnosis on synthetic jobs", _corpus(), _noise(), _prices(), _cost()])


def _corpus() -> str:
    total = score(CORPUS_SEED, REPEATS, HEALTHY)
    kinds = [kind for kind in _kinds(total) if total.right[kind] + total.missed[kind] + total.wrong[kind]]
    rows = [
        [
            str(kind), str(total.right[kind]), str(total.missed[kind]), str(total.wrong[kind]),
            f"{total.precision(kind):.3f}", f"{total.recall(kind):.3f}", str(total.misplaced[kind]),
        ]
        for kind in kinds
    ]  # fmt: skip
    intro = (
        f"Labelled synthetic jobs, seeds from {CORPUS_SEED} on: {total.traces} traces, every cause at three strengths,"
        f"\nevery pair of main causes, {total.healthy} healthy ones; {len(SHAPES) + 1} layouts, noise"
        f" {', '.join(map(str, NOISE))}, spread of workers {', '.join(map(str, WORKER_SPREAD))}.\n"
        "A cause must be found where it alone slows the job by 10 % or more. Healthy jobs with a cause named:"
        f" **{total.healthy_named}**."
    )
    figures = table(["cause", "found", "missed", "wrongly named", "precision", "recall", "misplaced"], rows)
    return f"{intro}\n\n{figures}"


def _kinds(total: Score) -> list:
    return sorted({*total.right, *total.missed, *total.wrong})


def _noise() -> str:
    """Few peers, drifting speeds and heavy tails: healthy jobs, and jobs with one worker 25 % slower."""
    rows = []
    for layout in FEW_PEERS:
        replay = job_of(layout, steps=24, noise=0.01)
        named_healthy = named_slow = 0
        for seed in range(NOISE_JOBS):
            noise = real_noise(replay, seed)
            slow = noise * one_worker(replay, [FORWARD, BACKWARD], 0, 1, 1.25)
            healthy, named = (_named(disturbed(replay, factor)) for factor in (noise, slow))
            named_healthy += bool(healthy)
            named_slow += named == [[0, 1]]
        rows.append(
            [
                f"dp {layout.dp} x pp {layout.pp}" + f" x vpp {layout.vpp}" * (layout.vpp > 1),
                str(NOISE_JOBS),
                str(named_healthy),
                str(named_slow),
            ]
        )
    figures = table(["job", "jobs", "false accusations when healthy", "slow worker found, and it alone"], rows)
    return f"Few peers, drifting speeds, heavy tails; healthy, and with one worker 25 % slower:\n\n{figures}"


def _named(replay: JobReplay) -> list[list[int]]:
    """Stage and DP rank of the slow workers."""
    profile = profile_computes(ComputeTable.of(replay.graph, replay.durations.cost))
    slow: list[list[int]] = np.argwhere(profile.slow_workers | profile.slow_ranks[None]).tolist()
    return slow


def _prices() -> str:
    errors = defaultdict(list)
    for checked in checked_fixes(PRICE_SEED, PRICE_REPEATS):
        errors[str(checked.fix.kind)].append(checked.error)
    everything = np.concatenate([np.array(values) for values in errors.values()])
    rows = [
        [kind, str(len(values)), f"{np.median(values):.2%}", f"{np.max(values):.2%}"]
        for kind, values in sorted(errors.items())
    ]
    rows.append(["**all**", str(len(everything)), f"{np.median(everything):.2%}", f"{everything.max():.2%}"])
    intro = (
        "Predicted step time of each fix against the job simulated with that fix and the same seed. Relative errors:"
    )
    return f"{intro}\n\n{table(['fix', 'jobs', 'median', 'worst'], rows)}"


def _cost() -> str:
    from tracekit.analysis.attribution.attribute import attribute
    from tracekit.analysis.diagnosis.diagnosis import diagnose
    from tracekit.analysis.diagnosis.of_pipeline import PipelineAssessment
    from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
    from tracekit.analysis.replay.engine import JobReplay
    from tracekit.synth import FlappingNetwork, PythonGc, SequenceLengthImbalance, SlowWorker, SynthSpec, synthesize
    from tracekit.trace.model import Layout

    causes = (SlowWorker(), SequenceLengthImbalance(), PythonGc(), FlappingNetwork())
    rows = []
    for workers in WORKERS:
        layout = Layout(dp=workers // PP, pp=PP, tp=8)
        trace = synthesize(SynthSpec(layout, microbatches=MICROBATCHES, steps=STEPS, causes=causes))
        replay = JobReplay.from_trace(trace)
        attribution = attribute(replay)
        diagnose(PipelineAssessment(PipelineSubject.of(trace, replay, lambda attribution=attribution: attribution)))
        attributed_s = median_s(lambda replay=replay: attribute(replay), 3)
        diagnosed_s = median_s(
            lambda job=(trace, replay, lambda attribution=attribution: attribution): diagnose(
                PipelineAssessment(PipelineSubject.of(*job))
            ),
            3,
        )
        rows.append([f"{workers:,}", f"{attributed_s:.2f}", f"{diagnosed_s:.2f}", f"{diagnosed_s / attributed_s:.2f}"])
    header = (
        f"Patterns, causes and fixes of a job with four causes, pp {PP}, {MICROBATCHES} microbatches, {STEPS} steps:"
    )
    return f"{header}\n\n{table(['workers', 'attribution s', 'causes and fixes s', 'ratio'], rows)}"
