"""What every door must do with whatever comes in: end in a report of finite numbers, or in one error of ours."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from typing import Any

from rich.console import Console

from tracekit.analysis.job.job import ReportOptions
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import TracekitError
from tracekit.dashboards.terminal.info import print_trace
from tracekit.dashboards.terminal.report import print_report
from tracekit.report.findings import Findings


def ends_well(call: Callable[[], Any]) -> Any:
    """What `call` returns, None where it raised an error of ours: one line, of bounded length."""
    try:
        return call()
    except TracekitError as error:
        assert len(str(error)) < 2000  # noqa: PT017 - the message is part of the property
        assert str(error).strip()  # noqa: PT017
        return None


def analyse(job: PipelineJob, **asked: Any) -> None:
    """Everything the commands do with a job; fails where a number is none or the step takes no time."""
    console = Console(file=io.StringIO(), width=100)
    print_trace(job.trace, console)
    analysis = job.analyse(ReportOptions(**asked))
    report = analysis.report
    content = json.loads(report.to_json())
    assert content["slowdown"] > 0
    assert all(seconds > 0 for seconds in content["step_time_s"].values())
    for name in ("slowdown", "waste", "wasted_gpu_hours", "wasted_gpu_hours_per_day"):
        assert math.isfinite(content[name])
    for found in (*content["causes"], *content["fixes"]):
        assert found.get("withheld") or math.isfinite(found["saved_s"])
    assert not math.isnan(content["trust"]["replay_error"])
    print_report(report, console)
    assert analysis.lanes is not None
    findings = Findings(report, analysis.lanes.worker_slowdowns())
    findings.figures()
    assert findings.workers is not None
    findings.workers.rows({})
