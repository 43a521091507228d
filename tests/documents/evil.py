"""A job whose names are as bad as names can be."""

from __future__ import annotations

from pathlib import Path

from tracekit.trace.canonical import Trace, read_parquet

SAMPLES = Path(__file__).parents[2] / "sample_traces"
#: What markup, right-to-left marks and quotes can do.
EVIL = "<img src=x onerror=alert(1)>|*a*\u202e\"'`&lt;</script>"


def write_evil(folder: Path) -> Path:
    """The job with a slow rank 9 under such a name, on such a host."""
    trace = read_parquet(SAMPLES / "slow_worker.parquet")
    metadata = {"hosts": {str(rank): f"{EVIL}{rank // 8}" for rank in range(16)}, "gpus": {"9": {"uuid": "GPU-secret"}}}
    path = folder / "evil.parquet"
    Trace.from_frame(trace.ops, trace.layout, name=EVIL, metadata=metadata).write_parquet(path)
    return path
