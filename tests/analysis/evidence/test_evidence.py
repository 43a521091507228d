"""Evidence is gathered once per job, only of jobs that have what it needs; a report loads what its job needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from judges.kinetosim import Job, Trouble
from tests.analysis.experts.simulated import simulate, varied
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
    loaded = modules_of_a_report(SAMPLES / trace)
    assert 50 < len(loaded) <= most
    assert not [name for name in loaded if name.startswith((*others, "store", "dashboards.browser", "fleet", "live"))]


@pytest.mark.slow
def test_a_larger_recording_loads_no_more_and_one_with_experts_their_modules(tmp_path: Path) -> None:
    """16 GPUs of which one is slow, and 4 with unequal loads of experts, beside the sample of 2."""
    of_sample = modules_of_a_report(SAMPLES / "gpu_slow_input")
    for folder in (many := tmp_path / "many", experts := tmp_path / "experts"):
        folder.mkdir()
    Job(ranks=16, steps=5, troubles=(Trouble(3, gpu=1.5),)).run().write(many)
    simulate(varied([[5.0, *[1.0] * 7]] * 3), experts)
    assert modules_of_a_report(many) == of_sample
    of_experts = {"analysis.detectors.uneven_experts", "analysis.experts"}
    of_experts |= {f"analysis.experts.{name}" for name in ("balance", "expert_loads", "loads")}
    assert modules_of_a_report(experts) == of_sample | of_experts


def modules_of_a_report(path: Path) -> set[str]:
    """The modules that `whatif` loads, without `tracekit.`."""
    code = f"""
import sys
from tracekit.cli import commands
commands.main(["whatif", {str(path)!r}], standalone_mode=False)
print("LOADED", *(name for name in sys.modules if name.partition(".")[0] == "tracekit"), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.removeprefix("tracekit.") for name in done.stderr.partition("LOADED ")[2].split()}
