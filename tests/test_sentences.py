"""The sentences of answers and findings: sentences.txt is where they stand in full; other tests ask for data wherever
they can.

A line of that file is the name of a small job and a sentence that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import polars as pl

from judges.eventsim.causes import Rise, SlowWorkers
from tests.analysis.causes import simulated
from tests.analysis.causes import test_breaks as breaks
from tests.analysis.causes import test_late_data as late_data
from tests.analysis.causes import test_lockstep as lockstep
from tests.analysis.causes import test_off_cpu as off_cpu
from tests.analysis.causes import test_rules_host as host
from tests.analysis.causes import test_stages_without_peers as stages
from tests.analysis.causes import test_unequal_microbatches as microbatches
from tests.analysis.causes import test_uneven_chunks as chunks
from tests.analysis.causes.test_workers_and_data import RISING
from tests.analysis.gpu import test_pace as pace
from tests.analysis.replay.test_ideal import evaluating
from tests.analysis.small_jobs import BACKWARD, FORWARD, Program, data_parallel_job
from tests.handmade import LAYOUT, healthy_frame, slow_frame
from tests.test_gpu_traces import SAMPLE
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.report.conclusions import Finding
from tracekit.report.report import Report
from tracekit.sources.load import load
from tracekit.synth import SynthSpec, synthesize
from tracekit.synth.injected_causes import SlowWorker
from tracekit.trace.canonical import Trace
from tracekit.trace.facts import COLLECTED
from tracekit.trace.model import Layout

USUAL, SLOW = (FORWARD, BACKWARD), (("forward-compute", 0.2), ("backward-compute", 0.4))
LOAD = ("data-load", 0.3)


def answered(*programs: Program, transfer_s: float = 0.01, **metadata: object) -> Report:
    """The report on eight steps of a job of these DP ranks."""
    trace = data_parallel_job(programs, steps=8, transfer_s=transfer_s)
    return PipelineJob(replace(trace, metadata=metadata)).whatif()


def slow_in(*steps: int, of: int = 20) -> Report:
    """Stage 0 of DP rank 1 loses 4.25 s of each slow step of 15.5 s, of that many steps."""
    healthy = healthy_frame([step for step in range(of) if step not in steps])
    ops = pl.concat([slow_frame(steps), healthy]).sort("step", maintain_order=True)
    return PipelineJob(Trace.from_frame(ops, LAYOUT, name="job")).whatif()


#: The jobs by which sentences.txt goes.
def slow_ranks(*dp_ranks: int) -> Report:
    """These DP ranks take 1.4 times as long as the others, on both stages."""
    causes = tuple(SlowWorker(dp_rank=dp_rank, pp_rank=stage, factor=1.4) for dp_rank in dp_ranks for stage in (0, 1))
    return PipelineJob(synthesize(SynthSpec(Layout(dp=4, pp=2), steps=12, noise=0.01, causes=causes, seed=3))).whatif()


JOBS: dict[str, Callable[[], Report | Diagnosis | Iterable[Finding]]] = {
    "slow rank": lambda: answered(*[USUAL] * 3, SLOW, hosts={"3": "node-1"}),
    "slow rank on CPUs": lambda: answered(*[USUAL] * 3, SLOW, format=COLLECTED),
    "slow rank of ops": lambda: pace.report_of(pace.of_one_slow_rank()),
    "slow from a step on": lambda: slow_in(*range(12, 20)),
    "slow up to a step": lambda: slow_in(*range(8)),
    "slow for a time": lambda: slow_in(*range(5, 11)),
    "slow now and then": lambda: slow_in(3, 7, 8, 12, 15),
    "slow for a moment": lambda: slow_in(5, 6, 7, of=40),
    "slow in forwards": lambda: answered(*[USUAL] * 3, (("forward-compute", 0.13), BACKWARD)),
    "garbage in every step": lambda: answered(*[USUAL] * 3, (*USUAL, ("gc", 0.2))),
    "late launches of a rank": lambda: PipelineJob(host.job("data-load", delay_s=(0.0, 1.0))).whatif(),
    "late launches of all": lambda: answered(*[(FORWARD, ("host-delay", 0.3), BACKWARD)] * 4),
    "late data and a slow rank": lambda: answered(
        *[(LOAD, *USUAL)] * 3, (LOAD, ("forward-compute", 0.15), ("backward-compute", 0.25))
    ),
    "causes that hide each other": lambda: answered(
        (("forward-compute", 0.15), ("backward-compute", 0.3)), *[(("data-load", 0.15), *USUAL)] * 3
    ),
    "communication": lambda: answered(*[USUAL] * 4, transfer_s=0.4),
    "evaluation by one for all": lambda: PipelineJob(evaluating(0.4, 0.0)).whatif(),
    "nothing wrong": lambda: answered(*[USUAL] * 4),
    "nothing wrong on one rank": lambda: pace.report_of(
        pace.of_one_slow_rank().filter(rank=2).with_columns(rendezvous=None)
    ),
    "late data in a recording": lambda: load(SAMPLE).report,
    "growing": lambda: simulated.named(
        simulated.job(SlowWorkers(frozenset({(2, 1)}), 1.5, rise=Rise.LINEAR), shape=RISING)
    ),
    "rank of a worker": lambda: lockstep.report(slow_frame(range(12)), lockstep.halves),
    "rank without a number": lambda: (
        lockstep.report(slow_frame(range(12)), lockstep.halves, ranks_of_workers={"1": "five"}).findings
    ),
    "ranks in turn": lambda: lockstep.report(healthy_frame(range(12)), lockstep.in_turn()).findings,
    "stopped rank of a worker": lambda: lockstep.stopped().findings,
    "stopped process": lambda: off_cpu.causes(in_forward=off_cpu.STOP_S),
    "loss": lambda: host.causes_with_losses((1.0, 1.0, 1.0), (0.1, 0.4, 0.1)),
    "host code between steps": lambda: stages.causes(lambda _: stages.step(host=(0.001, 0.2))),
    "busy cores": lambda: host.without_cores((1.5, 1.5)),
    "busy cores of two hosts": lambda: host.without_cores((1.5, 1.2), hosts=("node-1", "node-2")),
    "break of one for all": lambda: [breaks.named({0: (1, 4, 7, 10)})],
    "break of all": lambda: [breaks.named({0: (2, 5, 8, 11), 1: (2, 5, 8, 11)}, gathered=True)],
    "late data on changing ranks": lambda: [late_data.late_in({0: range(6), 1: range(6, 10)}, 2)],
    "optimizer": lambda: stages.causes(lambda _: stages.step(optimizer=(0.025, 0.5))),
    "more microbatches": lambda: microbatches.report(microbatches.counted(*[(6, 4, 4, 4)] * 8)),
    "microbatches as they come": lambda: microbatches.report(microbatches.counted(*microbatches.DRAWN)),
    "more ops": lambda: microbatches.of_ops().findings,
    "slow DP rank": lambda: slow_ranks(1),
    "slow kind of machine": lambda: slow_ranks(1, 2),
    "chunk": lambda: chunks.report({("B", 3): 3.0}).causes,
    "chunk in forwards": lambda: chunks.report({("F", 0): 1.5}).causes,
    "chunk in both directions": lambda: chunks.report({("B", 3): 3.0, ("F", 3): 5.0}).causes,
}


def sentences_of(analysed: Report | Diagnosis | Iterable[Finding]) -> set[str | None]:
    """What the answer says, if there is one, and of each finding its title and its effect."""
    match analysed:
        case Report(answer=answer, findings=findings) | Diagnosis(answer=answer, causes=findings):
            said = {answer.headline, answer.cost, answer.who, answer.fix, answer.check, *answer.others}
        case findings:
            said = set()
    return said | {f"{finding.title}: {finding.effect}" for finding in findings}


def test_answers_and_findings_say_this() -> None:
    written = [line.split(": ", 1) for line in Path(__file__).with_name("sentences.txt").read_text().splitlines()]
    said = {name: sentences_of(analysed()) for name, analysed in JOBS.items()}
    assert {name for name, _ in written} == JOBS.keys()
    for name, sentence in written:
        assert sentence in said[name], (name, said[name])
