"""Metrics as a witness: what they say of the machines that findings name.

In: findings, and a source of metrics, or what was sampled while the job was recorded. Out: the findings, with what was
confirmed, refuted or could not be tested in their words, and the advice that follows; the tests. Nothing else decides
whether hardware is swapped or drained: metrics that were asked or sampled over time have to confirm it. Recordings
without such series have medians of clocks and shares of faults, which decide alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.detectors.detector import detector_of, remedy_for
from tracekit.analysis.diagnosis.find import acting
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import Sampled, report_faults, sampled, shares_card
from tracekit.analysis.evidence.subject import Cause, Subject, evidence
from tracekit.analysis.metrics.effects import EFFECTS
from tracekit.analysis.metrics.guided import Suspicion, untestable, verdicts_on
from tracekit.analysis.metrics.samples import (
    MECHANISMS,
    RECORDING,
    MetricSource,
    Samples,
    TimeSpan,
    metrics_of,
    sampled_metrics,
)
from tracekit.base.errors import FormatError
from tracekit.report.finding import Place
from tracekit.report.hardware import MechanismName, MetricsInReport, MetricTest, MetricVerdict
from tracekit.trace.facts import Fact
from tracekit.trace.model import Worker

#: Clock times of traces are seconds since 1970; smaller ones are of another clock.
_EARLIEST_S = 1e9
#: Of a finding on more hosts, so many are tested.
_MOST_HOSTS = 16
#: Mechanisms of which the hardware is to blame.
_OF_HARDWARE = (MechanismName.CLOCK, MechanismName.LINK)
#: Sentences that a finding tells.
_MOST_SENTENCES = 2
_CONFIRMED = {
    MechanismName.CLOCK: "swap {hosts} for a spare, because metrics confirm that its GPUs run at a lower clock; have"
    " power, cooling and clock limits checked (nvidia-smi -q -d PERFORMANCE,CLOCK,POWER)",
    MechanismName.LINK: "swap {hosts} for a spare, because metrics confirm that its link is slower; have cable, port"
    " and PCIe slot of its network card checked",
    MechanismName.CPU_PRESSURE: "stop what else runs on the cores of {hosts}, or raise the CPU limit of its containers:"
    " metrics confirm that its processes wait for a CPU (/proc/pressure/cpu, top)",
    MechanismName.CPU_LIMIT: "raise the CPU limit of {ranks} on {hosts}, which throttles them (cpu.max or"
    " cpu.cfs_quota_us of the container)",
    MechanismName.MEMORY_PRESSURE: "free memory on {hosts}: metrics confirm that its processes wait for it"
    " (/proc/pressure/memory, memory.stat)",
    MechanismName.IO_PRESSURE: "stop what else reads or writes on {hosts}: metrics confirm that its processes wait for"
    " I/O (/proc/pressure/io, iotop)",
}
#: A GPU is known to be throttled.
_THROTTLED_RANK = "swap {hosts} for a spare, because the GPUs of {ranks} are throttled; have power and cooling checked"
_THROTTLED_HOST = "drain {hosts}, because its GPUs are throttled; have power and cooling checked"
#: GPUs were sampled: they are not what differs, but for a low clock.
_OF_SAMPLED = {
    Sampled.SAME_CARD: "profile {ranks} on {hosts} and a peer (torch.profiler, py-spy): both compute on one GPU, so"
    " look for more work, other input or user code",
    Sampled.LOW_CLOCK: "raise the GPU clocks of {ranks} on {hosts}, which are lower than those of others (nvidia-smi -q"
    " -d CLOCK,POWER: application clocks, locked clocks, power limit)",
    Sampled.SAME_CLOCK: "profile {ranks} on {hosts} and a peer (torch.profiler, py-spy): GPUs ran at the clock of the"
    " others, so look for more work, other input or user code",
}
_REFUTED = {
    "compute": "profile {ranks} on {hosts} and a peer (torch.profiler, py-spy): metrics refute a lower clock, so"
    " look for more work, other input or user code",
    "network": "look at what {ranks} on {hosts} send, and at the switches between: metrics refute a slow link",
    "process": "find what stops {ranks} on {hosts} (perf sched, strace -e signal, gc.callbacks): metrics refute that"
    " the processes wait for a CPU",
}


def reviewed(
    job: Subject, findings: Sequence[Cause], source: MetricSource | None
) -> tuple[tuple[Cause, ...], MetricsInReport | None]:
    """Ask metrics about every finding on a machine. A source that cannot be read leaves all of them not testable.

    Without a source, what was sampled while the job was recorded is asked, and heard only where it can tell.
    """
    if source is None:
        metrics = sampled_metrics(job.metadata)
        recorded = [_tested(job, findings, metric, metric.machines)[0] for metric in metrics]
        tests = [_decisive_tests(of_finding) for of_finding in zip(*recorded, strict=True)] or [()] * len(findings)
        all_tests = [test for of_finding in tests for test in of_finding]
        in_report = MetricsInReport(RECORDING, all_tests) if all_tests else None
    else:
        tests, in_report = _tested(job, findings, source, job.names.host_of_rank)
    reviewed = (replace(finding, tests=of_finding) for finding, of_finding in zip(findings, tests, strict=True))
    return tuple(_advised(job, finding) for finding in reviewed), in_report


def _tested(
    job: Subject, findings: Sequence[Cause], source: MetricSource, machines: Mapping[int, str]
) -> tuple[list[tuple[MetricTest, ...]], MetricsInReport]:
    """The tests of each finding. `machines`: the name of the machine of each rank, as the source has it."""
    suspected = [list(_suspicions(job, finding, machines)) for finding in findings]
    in_report = _run_tests(source, [suspicion for of_finding in suspected for suspicion in of_finding])
    tests = iter(in_report.tests)
    return [tuple(next(tests) for _ in of_finding) for of_finding in suspected], in_report


def _decisive_tests(by_metric: Sequence[tuple[MetricTest, ...]]) -> tuple[MetricTest, ...]:
    """The tests of a finding by the first of several metrics that confirms it, else by the first that refutes it."""

    def verdicts(tests: Sequence[MetricTest]) -> set[MetricVerdict]:
        return {test.verdict for test in tests}

    decisive = [tests for tests in by_metric if tests and MetricVerdict.NOT_TESTABLE not in verdicts(tests)]
    return max(decisive, key=lambda tests: MetricVerdict.CONFIRMED in verdicts(tests), default=())


def _run_tests(source: MetricSource, suspicions: Sequence[Suspicion]) -> MetricsInReport:
    """The tests of suspicions, in this order."""
    askable = [suspicion for suspicion in suspicions if suspicion.untestable is None]
    if not askable:
        return MetricsInReport(source.name, [untestable(row, row.untestable or "") for row in suspicions])
    window = TimeSpan(min(row.window.since for row in askable), max(row.window.until for row in askable))
    hosts = {host for suspicion in askable for host in (suspicion.host, *(suspicion.peers or ()))}
    try:
        samples = Samples.of(source.samples(metrics_of(suspicion.part for suspicion in askable), window, hosts))
    except FormatError as error:
        return MetricsInReport(source.name, [untestable(row, str(error)) for row in suspicions], problem=str(error))
    return MetricsInReport(source.name, verdicts_on(samples, suspicions), samples.dropped)


def _suspicions(job: Subject, finding: Cause, machines: Mapping[int, str]) -> Iterator[Suspicion]:
    """What to ask about a finding: once for each machine, nothing if no metric of a machine shows the part."""
    detector = detector_of(finding.kind)
    part = detector.part_of_machine or detector.part
    if part not in MECHANISMS or finding.change is None:
        return
    ranks = [rank for rank, _ in job.places(_where(finding)) if rank is not None]
    hosts = dict.fromkeys(machines[rank] for rank in ranks if rank in machines)
    window = _window(job, finding)
    why_not = None
    if window is None:
        why_not = "the trace does not say at what time of day it was recorded"
    elif finding.excess is None or finding.excess <= 0:
        why_not = "the trace does not show by how much longer the work takes"
    elif shares_card(job, finding.where.workers):
        why_not = "two ranks compute on one GPU, which its clock does not show"
    for host in list(hosts)[:_MOST_HOSTS]:
        peers = _peers(job, finding, host, machines)
        yield Suspicion(host, part, finding.excess or 0.0, window or TimeSpan(0.0, 0.0), peers, why_not)


def _where(finding: Cause) -> Place:
    """The place whose machines are tested."""
    return finding.where if finding.slowest is None else Place(workers=(finding.slowest,))


def _window(job: Subject, finding: Cause) -> TimeSpan | None:
    """The longest run of steps in which a finding acts, by the clock, or the whole recording of GPUs; None if the trace
    has no such times.
    """
    spans = _spans_of_steps(job)
    if spans is None:
        return _span_of_recording(job)
    acts = acting(job, finding.time)
    active = np.ones(len(spans), np.bool_) if acts is None else acts
    edges = np.flatnonzero(np.diff(np.concatenate([[0], active.astype(np.int8), [0]])))
    first, after = max(zip(edges[::2], edges[1::2], strict=True), key=lambda run: run[1] - run[0])
    begin, end = spans[first], spans[after - 1]
    return None if begin is None or end is None or begin.since < _EARLIEST_S else TimeSpan(begin.since, end.until)


@evidence(RecordingSubject)
def _span_of_recording(job: RecordingSubject) -> TimeSpan | None:
    began_s = job.summary.began_s
    return None if began_s is None else TimeSpan(began_s, began_s + job.recorded_s)


@evidence(PipelineSubject)
def _spans_of_steps(job: PipelineSubject) -> list[TimeSpan | None]:
    """When each step ran, None if the trace does not say."""
    starts = map(job.trace.step_starts.get, np.asarray(job.steps).tolist())
    lasted_s = job.attribution.recorded.tolist()
    return [None if since is None else TimeSpan(since, since + s) for since, s in zip(starts, lasted_s, strict=True)]


def _peers(job: Subject, finding: Cause, host: str, machines: Mapping[int, str]) -> frozenset[str]:
    """The machines of the same stage, which compute the same; all of the job's if those are too few."""
    stages = {worker.pp_rank for _, worker in job.places(finding.where) if worker is not None}
    ranks = [rank for worker, rank in job.names.ranks.items() if worker.pp_rank in stages]
    alike = frozenset(machines[rank] for rank in ranks if rank in machines)
    return alike if len(alike - {host}) >= EFFECTS.fewest_peers else frozenset(machines.values())


def _advised(job: Subject, finding: Cause) -> Cause:
    """A finding with the sentences of its tests, and the advice that follows from them or, without any, from what was
    recorded of its GPUs.
    """
    tests, where = finding.tests, _where(finding)
    advice, hardware = _by_recording(job, finding)
    confirmed = [test for test in tests if test.verdict is MetricVerdict.CONFIRMED]
    mechanism = confirmed[0].mechanism if confirmed else None
    # Either end of a link makes it slow; of several machines, each has to be slow itself.
    if mechanism is not None and (where.links or len(confirmed) == len(tests)):
        advice, hardware = _CONFIRMED[mechanism], mechanism in _OF_HARDWARE
        if mechanism is MechanismName.CLOCK and _without_faults(job, finding):
            advice, hardware = _OF_SAMPLED[Sampled.LOW_CLOCK], False
        where = Place(host=confirmed[0].host) if where.links else where
    elif tests and all(test.verdict is MetricVerdict.REFUTED for test in tests):
        advice, hardware = _REFUTED[tests[0].part], False
    elif tests and hardware:  # metrics were asked and do not confirm it
        advice, hardware = None, False
    tests_to_tell = [*confirmed, *(test for test in tests if test not in confirmed)][:_MOST_SENTENCES]
    remedy = None if advice is None else remedy_for(advice, job.names, where, on_cpus=not job.shows(Fact.GPUS))
    return replace(
        finding,
        effect="; ".join([finding.effect, *(test.sentence for test in tests_to_tell)]),
        suggested_fix=remedy or finding.suggested_fix,
        hardware=hardware,
    )


def _by_recording(job: Subject, finding: Cause) -> tuple[str | None, bool]:
    """What the GPUs that were sampled say of a finding: the advice, if any, and whether the hardware is at fault."""
    workers = _computing(job, finding)
    if not isinstance(job, PipelineSubject) or not workers:
        return None, False
    says, host = sampled(job, workers), finding.where.host
    if says is Sampled.FAULTY:
        return (_THROTTLED_RANK if host is None else _THROTTLED_HOST), True
    return _OF_SAMPLED.get(says) if finding.where.workers and host is None else None, False


def _without_faults(job: Subject, finding: Cause) -> bool:
    """Whether the GPUs of a finding were asked for reasons of a lower clock, and gave none that is a fault."""
    return report_faults(job, _computing(job, finding)) is False


def _computing(job: Subject, finding: Cause) -> list[Worker]:
    """The workers of a finding, if these compute slower as a whole."""
    if detector_of(finding.kind).part != "compute" or finding.where.ranks:
        return []
    return [worker for _, worker in job.places(finding.where) if worker is not None]
