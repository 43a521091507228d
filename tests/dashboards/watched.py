"""A job that is watched while it runs, for pages about windows, incidents and hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.analysis.small_jobs import BACKWARD, FORWARD, data_parallel_job
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.store import Incoming, Store
from tracekit.trace.canonical import Trace

HOSTS = {"0": "node-a", "1": "node-b", "2": "node-c", "3": "node-d"}


def trace(*, slow: bool, name: str = "live") -> Trace:
    """Four steps of four ranks, each on a host of its own; `slow`: the forwards of rank 3 take three times as long."""
    even = [FORWARD, BACKWARD]
    last = [("forward-compute", 0.3), BACKWARD] if slow else even
    return replace(data_parallel_job([even, even, even, last]), name=name, metadata={"hosts": HOSTS})


def analysed(ran: Trace) -> Incoming:
    """A window on its way into the store."""
    return Incoming(ran, ran.name, "collect", PipelineJob(ran).stored())


def write_watched(path: Path) -> Path:
    """A store with a job of two windows in which rank 3 is slow, and one in which that is over."""
    store = Store(path)
    for name, slow in (("live", (True, True)), ("over", (True, False, False))):
        for each in slow:
            store.append(analysed(trace(slow=each, name=name)))
    return path
