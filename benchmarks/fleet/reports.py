"""Reports on 100,000 jobs: in the terminal, as a page, and the dashboard's."""

import json
import shutil
import subprocess
from pathlib import Path

import polars as pl

from benchmarks.fleet.common import KEPT, first_jobs, fleet_run
from benchmarks.measure import measure, table, tracekit
from tracekit.fleet.study import PARTS, Study
from tracekit.fleet.tables import BY_JOB, STUDY_VERSION, TABLES

SMALL, REPORTED = 200, 100_000


def section() -> str:
    """Each report a few times."""
    calm, large = KEPT / f"study-{SMALL}", KEPT / f"study-{REPORTED}"
    if not calm.exists():
        subprocess.run(fleet_run(first_jobs(SMALL), calm), check=True, capture_output=True)
    jobs = enlarge(Study(calm), large, REPORTED)
    rows = []
    for words, more in (("terminal", ()), ("page in a file", ("--html", str(KEPT / "fleet.html")))):
        run = measure(*tracekit("fleet", "report", str(large), *more), runs=3)
        rows.append([words, f"{run.wall_s:.1f}", f"{run.cpu_s:.1f}", f"{run.peak_mb:,.0f}"])
    machines = Study(large).table("machines").select(pl.len()).collect().item()
    words = f"A study of {jobs:,} jobs with {machines:,} rows of machines: a smaller one, many times over."
    return f"## Fleets: reports\n\n{words}\n\n{table(['fleet report', 's', 'CPU s', 'MB'], rows)}"


def enlarge(small: Study, large: Path, wanted: int) -> int:
    """Write a study with the jobs of `small` many times under other digests, `wanted` at most; how many it has."""
    shutil.rmtree(large, ignore_errors=True)
    jobs = small.read("jobs").height
    copies = wanted // jobs
    for name in (*BY_JOB, "sources", "exclusions"):
        (large / name).mkdir(parents=True)
        rows = small.read(name)
        for part, digit in enumerate(PARTS):
            many = [_copy(rows, f"{digit}{number:03x}") for number in range(part, copies, len(PARTS))]
            pl.concat([rows.clear(), *many]).cast(TABLES[name]).sort("job").write_parquet(
                large / name / f"part-{digit}.parquet"
            )
    (large / "tracekit-study").write_text(json.dumps({"study_version": STUDY_VERSION}))
    return copies * jobs


def _copy(rows: pl.DataFrame, beginning: str) -> pl.DataFrame:
    """The same rows under digests, and of sources, that begin otherwise."""
    copied = rows.with_columns(job=pl.lit(beginning) + pl.col("job").str.slice(len(beginning)))
    return copied.with_columns(source=pl.col("source") + f"#{beginning}") if "source" in rows.columns else copied
