"""Evidence is gathered once per job, only of jobs that have what it needs, and loads no detector of another kind."""

from __future__ import annotations

import subprocess
import sys

from tests.handmade import LAYOUT, healthy_frame
from tracekit.analysis.detectors.all_detectors import detector_of, kinds, own_detectors
from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.trace.canonical import Trace


def pipeline() -> PipelineSubject:
    return PipelineJob(Trace.from_frame(healthy_frame(range(2)), LAYOUT, name="job")).evidence


def test_it_is_gathered_once_per_job() -> None:
    gathered = []

    @evidence(PipelineSubject)
    def stages_of(job: PipelineSubject) -> int:
        gathered.append(job)
        return job.stages

    first, second = pipeline(), pipeline()
    assert [stages_of(job) for job in (first, first, second)] == [LAYOUT.pp] * 3
    assert gathered == [first, second]


def test_a_job_of_another_kind_has_none() -> None:
    @evidence(GraphSubject)
    def ranks_of(job: GraphSubject) -> int:
        return len(job.ranks)

    assert ranks_of(pipeline()) is None


def test_the_registry_names_each_detector_as_it_names_itself() -> None:
    assert {detector.kind for detector in own_detectors()} <= kinds()
    assert all(detector_of(detector.kind) is detector for detector in own_detectors())


def test_detectors_of_other_kinds_of_jobs_are_not_loaded() -> None:
    code = """
import sys
from tracekit.analysis.detectors.all_detectors import detectors
from tracekit.analysis.evidence.subject import JobKind
detectors(JobKind.POST_TRAINING)
print("tracekit.analysis.detectors.slow_kernels" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
