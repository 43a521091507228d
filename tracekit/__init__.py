"""tracekit: what slows a large training job down, who causes it, and what each fix would buy.

    import tracekit
    report = tracekit.load("job.parquet").whatif()

Names below are loaded on first use: importing tracekit inside a training process costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.collectors import span, step
    from tracekit.errors import TracekitError
    from tracekit.gpu_job import GpuJob, load_gpu
    from tracekit.job import Job, load, load_from_store
    from tracekit.model import Layout, OpKind, ProcessGroup, Worker
    from tracekit.op_job import OpJob, load_ops, load_ops_from_store
    from tracekit.op_trace import OpTrace
    from tracekit.trace import Trace

__version__ = "0.1.0"

_HOMES = {
    "TracekitError": "tracekit.errors",
    "GpuJob": "tracekit.gpu_job",
    "Job": "tracekit.job",
    "load": "tracekit.job",
    "load_from_store": "tracekit.job",
    "load_gpu": "tracekit.gpu_job",
    "Layout": "tracekit.model",
    "OpKind": "tracekit.model",
    "OpJob": "tracekit.op_job",
    "OpTrace": "tracekit.op_trace",
    "ProcessGroup": "tracekit.model",
    "Worker": "tracekit.model",
    "load_ops": "tracekit.op_job",
    "load_ops_from_store": "tracekit.op_job",
    "Trace": "tracekit.trace",
    "span": "tracekit.collectors",
    "step": "tracekit.collectors",
}
__all__ = [
    "GpuJob",
    "Job",
    "Layout",
    "OpJob",
    "OpKind",
    "OpTrace",
    "ProcessGroup",
    "Trace",
    "TracekitError",
    "Worker",
    "__version__",
    "load",
    "load_from_store",
    "load_gpu",
    "load_ops",
    "load_ops_from_store",
    "span",
    "step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tracekit' has no attribute {name!r}")
    from importlib import import_module

    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != _HOMES[name]:
            raise
        raise ImportError(f"tracekit.{name}: tracekit-collect only records; install tracekit to analyse") from None
    globals()[name] = value  # later accesses find it without coming here
    return value
