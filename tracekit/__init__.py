"""tracekit: what slows a large training job down, who causes it, and what each fix would buy.

    import tracekit
    report = tracekit.load("job.parquet").whatif()

Names below are loaded on first use: importing tracekit inside a training process costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.analysis.job.job import Job as Job
    from tracekit.base.errors import TracekitError as TracekitError
    from tracekit.collectors import log as log
    from tracekit.collectors import span as span
    from tracekit.collectors import step as step
    from tracekit.dashboards.documents.card import card as card
    from tracekit.dashboards.figures.plots import plot as plot
    from tracekit.dashboards.trackers import log_to as log_to
    from tracekit.report.report import Report as Report
    from tracekit.report.report_file import read_report as read_report
    from tracekit.sources.load import load as load
    from tracekit.sources.load import load_from_store as load_from_store
    from tracekit.sources.registry import job_of as job_of
    from tracekit.trace.canonical import Trace as Trace
    from tracekit.trace.model import Layout as Layout
    from tracekit.trace.model import OpKind as OpKind
    from tracekit.trace.model import ProcessGroup as ProcessGroup
    from tracekit.trace.model import Worker as Worker
    from tracekit.trace.op import OpTrace as OpTrace

__version__ = "0.1.0"

_HOMES = {
    "TracekitError": "tracekit.base.errors",
    "Job": "tracekit.analysis.job.job",
    "job_of": "tracekit.sources.registry",
    "load": "tracekit.sources.load",
    "load_from_store": "tracekit.sources.load",
    "Report": "tracekit.report.report",
    "read_report": "tracekit.report.report_file",
    "card": "tracekit.dashboards.documents.card",
    "plot": "tracekit.dashboards.figures.plots",
    "log_to": "tracekit.dashboards.trackers",
    "Layout": "tracekit.trace.model",
    "OpKind": "tracekit.trace.model",
    "OpTrace": "tracekit.trace.op",
    "ProcessGroup": "tracekit.trace.model",
    "Worker": "tracekit.trace.model",
    "Trace": "tracekit.trace.canonical",
    "log": "tracekit.collectors",
    "span": "tracekit.collectors",
    "step": "tracekit.collectors",
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - names alone


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tracekit' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if not f"{_HOMES[name]}.".startswith(f"{error.name}."):  # another module than its home is missing
            raise
        raise ImportError(
            f"tracekit.{name}: tracekit-collect only records; install tracekit-analysis to analyse"
        ) from None
    globals()[name] = value  # later accesses find it without coming here
    return value
