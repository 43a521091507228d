"""Metrics as a witness: what they say of the machines that findings name.

In: findings, and a source of metrics. Out: the findings, with what was confirmed, refuted or could not be tested in
their words, and the advice that follows; the tests. Hardware is swapped or drained only if metrics confirm it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from tracekit.analysis.detectors.all_detectors import detector_of
from tracekit.analysis.detectors.remedies import Advice, remedy_for
from tracekit.analysis.diagnosis.assessment import Assessment
from tracekit.analysis.diagnosis.find import acting
from tracekit.analysis.evidence.cards import shares_card
from tracekit.analysis.evidence.cause import Cause
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.metrics.effects import FEWEST_PEERS
from tracekit.analysis.metrics.guided import Suspicion, untestable, verdicts_on
from tracekit.analysis.metrics.mechanisms import MECHANISMS, metrics_of
from tracekit.analysis.metrics.recorded_clocks import RecordedClocks
from tracekit.analysis.metrics.samples import MetricSource, Samples, TimeSpan
from tracekit.base.errors import FormatError
from tracekit.report.finding import Place
from tracekit.report.metrics import MechanismName, MetricsInReport, MetricVerdict
from tracekit.trace.facts import Fact

#: Clock times of traces are seconds since 1970; smaller ones are of another clock.
_EARLIEST_S = 1e9
#: Of a finding on more hosts, so many are tested.
_MOST_HOSTS = 16
#: Sentences that a finding tells.
_MOST_SENTENCES = 2
_CONFIRMED = {
    MechanismName.CLOCK: "swap {hosts} for a spare, because metrics confirm that its GPUs run at a lower clock; have"
    " power, cooling and clock limits checked (nvidia-smi -q -d PERFORMANCE,CLOCK,POWER)",
    MechanismName.LINK: "swap {hosts} for a spare, because metrics confirm that its link is slower; have cable, port"
    " and PCIe slot of its network card checked",
    MechanismName.CPU_PRESSURE: "stop what else runs on the cores of {hosts}, or raise the CPU limit of its containers:"
    " metrics confirm that its processes wait for a CPU (/proc/pressure/cpu, top)",
}
_REFUTED = {
    "compute": "profile {ranks} on {hosts} beside a peer (torch.profiler, py-spy): metrics refute a lower clock, so"
    " look for more work, other input or user code",
    "network": "look at what {ranks} on {hosts} send, and at the switches between: metrics refute a slow link",
    "process": "find what stops {ranks} on {hosts} (perf sched, strace -e signal, gc.callbacks): metrics refute that"
    " the processes wait for a CPU",
}


def reviewed(
    assessed: Assessment, findings: Sequence[Cause], source: MetricSource | None
) -> tuple[tuple[Cause, ...], MetricsInReport | None]:
    """Ask metrics about every finding on a machine. A source that cannot be read leaves all of them not testable.

    Without a source, what was sampled while the job was recorded is asked, and heard only where it can tell.
    """
    job = assessed.job
    sampled = RecordedClocks.of(job.metadata)
    if source is None:
        return (tuple(findings), None) if sampled is None else _reviewed(assessed, findings, sampled, sampled.machines)
    return _reviewed(assessed, findings, source, job.names.host_of_rank)


def _reviewed(
    assessed: Assessment, findings: Sequence[Cause], source: MetricSource, machines: Mapping[int, str]
) -> tuple[tuple[Cause, ...], MetricsInReport | None]:
    """`machines`: the name of the machine of each rank, as the source has it."""
    suspected = [list(_suspicions(assessed.job, finding, machines)) for finding in findings]
    every = [suspicion for of_one in suspected for suspicion in of_one]
    heard = _heard(source, every)
    tests = iter(heard.tests)
    with_tests = [
        replace(finding, tests=tuple(next(tests) for _ in of_one))
        for finding, of_one in zip(findings, suspected, strict=True)
    ]
    if isinstance(source, RecordedClocks):
        with_tests = [each if _testable(each) else replace(each, tests=()) for each in with_tests]
        heard = replace(heard, tests=[test for each in with_tests for test in each.tests])
    advised = tuple(_advised(assessed, finding) if finding.tests else finding for finding in with_tests)
    return advised, heard if heard.tests or not isinstance(source, RecordedClocks) else None


def _testable(finding: Cause) -> bool:
    return all(test.verdict is not MetricVerdict.NOT_TESTABLE for test in finding.tests)


def _heard(source: MetricSource, suspicions: Sequence[Suspicion]) -> MetricsInReport:
    """The tests of suspicions, in this order."""
    askable = [each for each in suspicions if each.untestable is None]
    if not askable:
        return MetricsInReport(source.name, [untestable(each, each.untestable or "") for each in suspicions])
    window = TimeSpan(min(each.window.since for each in askable), max(each.window.until for each in askable))
    hosts = {host for each in askable for host in (each.host, *(each.peers or ()))}
    try:
        samples = Samples.of(source.samples(metrics_of(each.part for each in askable), window, hosts))
    except FormatError as error:
        return MetricsInReport(source.name, [untestable(each, str(error)) for each in suspicions], problem=str(error))
    return MetricsInReport(source.name, verdicts_on(samples, suspicions), samples.dropped)


def _suspicions(job: Subject, finding: Cause, machines: Mapping[int, str]) -> Iterator[Suspicion]:
    """What to ask about a finding: once for each machine, nothing if no metric of a machine shows the part."""
    part = detector_of(finding.kind).part
    if part not in MECHANISMS or finding.change is None:
        return
    ranks = [rank for rank, _ in job.places(finding.where) if rank is not None]
    hosts = dict.fromkeys(machines[rank] for rank in ranks if rank in machines)
    window = _window(job, finding)
    why_not = None
    if window is None:
        why_not = "the trace does not say at what time of day it was recorded"
    elif finding.excess is None or finding.excess <= 0:
        why_not = "the trace does not show by how much longer the work takes"
    elif isinstance(job, PipelineSubject) and shares_card(job, finding.where.workers):
        why_not = "two ranks compute on one GPU, which its clock does not show"
    for host in list(hosts)[:_MOST_HOSTS]:
        peers = _peers(job, finding, host, machines)
        yield Suspicion(host, part, finding.excess or 0.0, window or TimeSpan(0.0, 0.0), peers, why_not)


def _window(job: Subject, finding: Cause) -> TimeSpan | None:
    """The longest run of steps in which a finding acts, by the clock; None if the trace has no such times."""
    if not isinstance(job, PipelineSubject):
        return None
    steps = np.asarray(job.steps)
    acts = acting(job, finding.time)
    active = np.ones(len(steps), np.bool_) if acts is None else acts
    edges = np.flatnonzero(np.diff(np.concatenate([[0], active.astype(np.int8), [0]])))
    first, after = max(zip(edges[::2], edges[1::2], strict=True), key=lambda run: run[1] - run[0])
    starts = job.trace.step_starts
    since, until = starts.get(int(steps[first])), starts.get(int(steps[after - 1]))
    if since is None or until is None or since < _EARLIEST_S:
        return None
    return TimeSpan(since, until + float(job.attribution.recorded[after - 1]))


def _peers(job: Subject, finding: Cause, host: str, machines: Mapping[int, str]) -> frozenset[str]:
    """The machines of the same stage, which compute the same; all of the job's if those are too few."""
    stages = {worker.pp_rank for _, worker in job.places(finding.where) if worker is not None}
    ranks = [rank for worker, rank in job.names.ranks.items() if worker.pp_rank in stages]
    alike = frozenset(machines[rank] for rank in ranks if rank in machines)
    return alike if len(alike - {host}) >= FEWEST_PEERS else frozenset(machines.values())


def _advised(assessed: Assessment, finding: Cause) -> Cause:
    """A finding with the sentences of its tests, and the advice that follows."""
    job, tests = assessed.job, finding.tests
    confirmed = [test for test in tests if test.verdict is MetricVerdict.CONFIRMED]
    # Either end of a link makes it slow; of several machines, each has to be slow itself.
    certain = bool(confirmed) and (bool(finding.where.links) or len(confirmed) == len(tests))
    mechanism = confirmed[0].mechanism if confirmed else None
    heard = [*confirmed, *(test for test in tests if test not in confirmed)][:_MOST_SENTENCES]
    advice: str | Advice | None = None
    where = finding.where
    if certain and mechanism is not None:
        advice = _CONFIRMED[mechanism]
        where = Place(host=confirmed[0].host) if where.links else where
    elif all(test.verdict is MetricVerdict.REFUTED for test in tests):
        advice = _REFUTED[tests[0].part]
    elif assessed.machines_at_fault(finding.where):  # by the recording alone
        advice = detector_of(finding.kind).suggested_fix
    remedy = None if advice is None else remedy_for(advice, job.names, where, on_cpus=not job.shows(Fact.GPUS))
    return replace(
        finding,
        effect="; ".join([finding.effect, *(test.sentence for test in heard)]),
        suggested_fix=remedy or finding.suggested_fix,
        hardware=certain and mechanism is not MechanismName.CPU_PRESSURE,
    )
