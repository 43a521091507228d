"""What the scheduler of this process says of its job, so that a trace can be found by it.

In: the environment of a rank. Out: facts for the trace's metadata. Imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def scheduler_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """The identity of the job, and the user's labels, by key; empty without a scheduler."""
    named = {key: environment[name] for name, key in VARIABLES.items() if environment.get(name)}
    if "KUBERNETES_SERVICE_HOST" not in environment:  # JOB_NAME is a common name elsewhere
        named = {key: value for key, value in named.items() if not key.startswith("kubernetes")}
    labels = sorted(name for name in environment if name.startswith(LABEL) and len(name) > len(LABEL))
    named |= {f"label_{name.removeprefix(LABEL).lower()}": environment[name] for name in labels[:MOST_LABELS]}
    return {key: value for key, value in named.items() if value and len(value) <= LONGEST and value.isprintable()}
