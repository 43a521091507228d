"""A store of many large jobs: a few are analysed, the others share their rows and files."""

from __future__ import annotations

import os
from pathlib import Path

from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.store import Incoming, Store
from tracekit.store.folder import JOBS
from tracekit.synth import SynthSpec, parse_cause, synthesize
from tracekit.trace.model import Layout

#: Sizes of each job: 8,192 workers on 1,024 hosts.
LARGE, HOSTS = Layout(dp=1024, pp=8), 1024
STEPS, MICROBATCHES = 8, 8
CAUSES = ("slow-worker:factor=2", "slow-worker:dp=700,pp=3,factor=1.6", None)
#: Tables of the catalogue and the changed columns of a copied job; each loses a little less than the one before.
_COPIED = {
    "windows": "further AS job_id, lost_gpu_hours_per_day * (1 - further * 1e-5) AS lost_gpu_hours_per_day",
    "incidents": f"further AS job_id, ({len(CAUSES)} + row_number() OVER ())::INTEGER AS incident_id",
    **dict.fromkeys(("files", "hosts", "gpus", "findings", "culprits"), "further AS job_id"),
}


def fill(store: Path, jobs: int) -> None:
    """Write a store of that many jobs."""
    for number, cause in enumerate(CAUSES, start=1):
        causes = () if cause is None else (parse_cause(cause),)
        trace = synthesize(SynthSpec(LARGE, steps=STEPS, microbatches=MICROBATCHES, seed=number, causes=causes))
        Store(store).append(Incoming(trace, name(number), "synth", PipelineJob(trace).stored()))
    _copy_rows(store, jobs)
    for further in range(len(CAUSES) + 1, jobs + 1):
        (store / JOBS / str(further)).mkdir()
        for file in (store / JOBS / str(_original(further))).iterdir():
            os.link(file, store / JOBS / str(further) / file.name)


def name(number: int) -> str:
    """The name of a job; number 1 loses most."""
    return f"large-{number:05d}"


def _original(further: int) -> int:
    return 1 + (further - 1) % len(CAUSES)


def _copy_rows(store: Path, jobs: int) -> None:
    further = range(len(CAUSES) + 1, jobs + 1)
    with Store(store).writing() as writer:
        sql = writer.catalogue.connection
        sql.execute("CREATE TEMP TABLE copies (further INTEGER, job_id INTEGER)")
        sql.execute(
            "INSERT INTO copies SELECT unnest($further), unnest($originals)",
            {"further": list(further), "originals": [_original(number) for number in further]},
        )
        sql.execute("INSERT INTO jobs SELECT further, printf('large-%05d', further), 'synth' FROM copies")
        for table, changes in _COPIED.items():
            query = f"SELECT copied.* REPLACE ({changes}) FROM {table} AS copied JOIN copies USING (job_id)"  # noqa: S608 - our own names
            sql.execute(f"INSERT INTO {table} {query}")
