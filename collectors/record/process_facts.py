"""Facts about a recorded process: where it runs, what the scheduler says of its job, and how long its training
thread was ready to run but had no processor.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

#: Variable -> key of the metadata. Slurm sets its own; the manifest of a pod sets the others (deploy/kubernetes).
VARIABLES = {
    "SLURM_JOB_ID": "slurm_job_id",
    "SLURM_JOB_NAME": "slurm_job_name",
    "SLURM_JOB_PARTITION": "slurm_partition",
    "SLURM_JOB_ACCOUNT": "slurm_account",
    "SLURM_CLUSTER_NAME": "slurm_cluster",
    "SLURM_RESTART_COUNT": "slurm_restarts",
    "POD_NAMESPACE": "kubernetes_namespace",
    "JOB_NAME": "kubernetes_job",
}
#: `TRACEKIT_LABEL_TEAM=llm` becomes the key `label_team`.
LABEL = "TRACEKIT_LABEL_"
#: Characters of a value, and number of labels: the rest is left out.
LONGEST, MOST_LABELS = 200, 16


def process_facts(rank: int, world_size: int, attempt: int) -> dict[str, Any]:
    """The facts of this process, at this moment of both clocks."""
    return {
        "rank": rank,
        "world_size": world_size,
        "attempt": attempt,
        "host": socket.gethostname(),
        "process_id": os.getpid(),
        "local_rank": os.environ.get("LOCAL_RANK"),
        "program": sys.argv,
        "scheduler": scheduler_facts(os.environ),
        "time_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
    }


def scheduler_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """The identity of the job, and the user's labels, by key; empty without a scheduler."""
    named = {key: environment[name] for name, key in VARIABLES.items() if environment.get(name)}
    if "KUBERNETES_SERVICE_HOST" not in environment:  # JOB_NAME is a common name elsewhere
        named = {key: value for key, value in named.items() if not key.startswith("kubernetes")}
    labels = sorted(name for name in environment if name.startswith(LABEL) and len(name) > len(LABEL))
    named |= {f"label_{name.removeprefix(LABEL).lower()}": environment[name] for name in labels[:MOST_LABELS]}
    return {key: value for key, value in named.items() if value and len(value) <= LONGEST and value.isprintable()}


class RunQueue:
    """The waits of the thread that creates this object."""

    def __init__(self) -> None:
        try:
            self._accounts = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._accounts = -1

    def waited_ns(self) -> int | None:
        """Total time spent waiting for a processor, ns; None if the kernel does not count it."""
        if self._accounts < 0:
            return None
        return int(os.pread(self._accounts, 64, 0).split()[1])
