"""A job that several tests read is read, replayed and analysed once for each set of options.

In: the arguments of `tracekit.sources.load.load_trace`. Out: the job that an earlier call with equal arguments and
files returned, with its analyses. Jobs do not change, so tests can share them. A test that patches the code reads its
own.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

from tracekit.analysis.job.job import Analysis, Job, PathLike, Progress, ReportOptions
from tracekit.sources.load import load_trace

#: Jobs kept.
MOST_JOBS = 12
_jobs: OrderedDict[tuple[object, ...], Job] = OrderedDict()


def load_once(*paths: PathLike, **options: Any) -> Job:
    """`load_trace`, once for each set of arguments and contents."""
    try:
        key = (Path.cwd(), paths, *map(_digest, paths), *sorted(options.items()))
        hash(key)
    except (OSError, TypeError):  # nothing there, or an argument that cannot be compared
        return load_trace(*paths, **options)
    job = _jobs.pop(key, None) or _analysing_once(load_trace(*paths, **options))
    _jobs[key] = job
    if len(_jobs) > MOST_JOBS:
        _jobs.popitem(last=False)
    return job


def _digest(path: PathLike) -> bytes:
    top = Path(os.fsdecode(path))
    digest = hashlib.blake2b()
    for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
        digest.update(os.fsencode(file))
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.digest()


def _analysing_once(job: Job) -> Job:
    analyse = job.analyse
    analyses: dict[ReportOptions, Analysis] = {}

    def analyse_once(asked: ReportOptions, progress: Progress | None = None) -> Analysis:
        try:
            hash(asked)
        except TypeError:  # options with tables
            return analyse(asked, progress)
        if asked not in analyses:
            analyses[asked] = analyse(asked, progress)
        return analyses[asked]

    vars(job)["analyse"] = analyse_once
    return job
