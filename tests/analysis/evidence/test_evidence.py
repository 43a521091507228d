"""Evidence is gathered once per job, only of jobs that have what it needs; a report loads what its job needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.handmade import LAYOUT, healthy_frame
from tracekit.analysis.detectors.detector import detector_of, kinds, own_detectors
from tracekit.analysis.evidence.graph_subject import GraphSubject
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.subject import evidence
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.trace.canonical import Trace

SAMPLES = Path(__file__).parents[3] / "sample_traces"


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


@pytest.mark.parametrize(
    ("trace", "most", "others"),
    [
        (
            "collected.parquet",
            110,
            ("analysis.evidence.gpu_losses", "analysis.experts", "analysis.gpu", "analysis.plans", "analysis.rl"),
        ),
        (
            "gpu_slow_input",
            100,
            (
                "analysis.diagnosis.of_pipeline",
                "analysis.evidence.pipeline_subject",
                "analysis.experts",
                "analysis.fixes",
                "analysis.hardware",
                "analysis.plans",
            ),
        ),
    ],
)
def test_a_report_loads_what_jobs_of_its_kind_need(trace: str, most: int, others: tuple[str, ...]) -> None:
    code = f"""
import sys
from tracekit.cli import commands
commands.main(["whatif", {str(SAMPLES / trace)!r}], standalone_mode=False)
print("LOADED", *(name for name in sys.modules if name.partition(".")[0] == "tracekit"), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name.removeprefix("tracekit.") for name in done.stderr.partition("LOADED ")[2].split()]
    assert 50 < len(loaded) <= most
    assert not [name for name in loaded if name.startswith((*others, "store", "dashboards.browser", "fleet", "live"))]
