"""What deploy/ offers to Slurm and Kubernetes: scripts are run as slurmd would run them, manifests are held against the
schema of Kubernetes and our own options."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from tests.collectors.conftest import SCRIPTS, TIMEOUT_S
from tests.handmade import run
from tracekit import load
from tracekit.cli import commands
from tracekit.collectors.record.process_facts import LONGEST, MOST_LABELS, scheduler_facts
from tracekit.live.metrics import StoreMetrics, remembered
from tracekit.store import Incoming, Store

ROOT = Path(__file__).parents[1]
SLURM, MANIFESTS = ROOT / "deploy" / "slurm", sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "llama", "SLURM_JOB_PARTITION": "h100", "TRACEKIT_LABEL_TEAM": "llm"}


def script(name: str, *words: str, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script of deploy/slurm as slurmd does, with this Python first on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, **{variable: str(value) for variable, value in environment.items()}}
    return subprocess.run(
        ["bash", SLURM / name, *words], env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def exported(lines: str) -> dict[str, str]:
    """The variables that Slurm would give the task."""
    words = [line.removeprefix("export ").partition("=") for line in lines.splitlines()]
    return {name: value for name, _, value in words}


@pytest.mark.slow
def test_a_job_is_recorded_though_nobody_changed_its_command(tmp_path: Path) -> None:
    prolog = script("task_prolog.sh", TRACEKIT_TRACES=tmp_path, TRACEKIT_EVERY="1", **JOB)
    assert prolog.returncode == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = os.environ | JOB | exported(prolog.stdout) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    tasks = [
        subprocess.Popen([sys.executable, SCRIPTS / "quick.py"], env=job | {"RANK": rank, "WORLD_SIZE": "2"})
        for rank in ("0", "1")
    ]
    assert [task.wait(TIMEOUT_S) for task in tasks] == [0, 0]
    assert script("epilog.sh", "4711", TRACEKIT_TRACES=tmp_path).returncode == 0
    store = Store(tmp_path / "tracekit.store")
    (stored,) = store.jobs()
    assert (stored.name, stored.ranks, stored.steps) == ("4711-0", 2, 5)  # the first step is a warm-up
    known = {"slurm_job_id": "4711", "slurm_job_name": "llama", "slurm_partition": "h100", "label_team": "llm"}
    assert store.load("4711-0").metadata.items() >= known.items()
    found = run(
        "store", "sql", "SELECT job FROM jobs WHERE metadata->>'label_team' = 'llm'", "--csv", "--store", store.path
    )
    assert found.out.split() == ["job", "4711-0"]
    registry = CollectorRegistry()
    registry.register(StoreMetrics(remembered(store)))
    (series,) = (
        line for line in generate_latest(registry).decode().splitlines() if line.startswith("tracekit_job_info")
    )
    assert series == (
        'tracekit_job_info{label_team="llm",slurm_job_id="4711",slurm_job_name="llama",slurm_partition="h100",'
        'training_job="4711-0"} 1.0'
    )


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"TRACEKIT_TRACES": ""}, ""),
        ({"TRACEKIT_TRACES": "/proc/nowhere"}, "print tracekit: not recorded: /proc/nowhere/4711-0: cannot be written"),
        ({"TRACEKIT_PYTHON": "/no/python"}, "print tracekit: not recorded: /no/python has no tracekit-collect"),
        ({"TRACEKIT_EVERY": "often"}, "print tracekit: not recorded"),
    ],
)
def test_a_prolog_that_cannot_switch_recording_on_lets_the_task_run(
    environment: dict[str, str], words: str, tmp_path: Path
) -> None:
    prolog = script("task_prolog.sh", **JOB | {"TRACEKIT_TRACES": str(tmp_path)} | environment)
    assert prolog.returncode == 0
    assert prolog.stdout.startswith(words)
    assert "export" not in prolog.stdout


def test_an_epilog_of_a_job_that_was_not_recorded_is_silent(tmp_path: Path) -> None:
    epilog = script("epilog.sh", "12", TRACEKIT_TRACES=tmp_path)
    assert (epilog.returncode, epilog.stdout, epilog.stderr) == (0, "", "")


@pytest.mark.slow
def test_the_health_check_exits_with_1_on_the_node_at_fault_alone(tmp_path: Path) -> None:
    job = load(str(ROOT / "sample_traces" / "slow_worker.parquet"))  # rank 9 on host-0001 computes 80 % slower
    store = Store(tmp_path / "a store")
    store.append(Incoming(job.trace, "slow", "a sample", job.stored()))
    asked = {"TRACEKIT_STORE": store.path, "TEXTFILES": tmp_path}
    guilty = script("health_check.sh", SLURMD_NODENAME="host-0001", **asked)
    assert (guilty.returncode, guilty.stdout) == (1, "tracekit: host-0001 was slow in slow\n")
    assert (tmp_path / "tracekit.prom").read_text().splitlines()[-1] == "tracekit_node_at_fault 1"
    for node in ("host-0000", "x' OR 'a' = 'a"):
        healthy = script("health_check.sh", SLURMD_NODENAME=node, **asked)
        assert (healthy.returncode, healthy.stdout) == (0, "")
        assert (tmp_path / "tracekit.prom").read_text().splitlines()[-1] == "tracekit_node_at_fault 0"


def test_a_health_check_without_a_store_finds_no_fault(tmp_path: Path) -> None:
    assert script("health_check.sh", TRACEKIT_STORE=tmp_path / "none", SLURMD_NODENAME="a").returncode == 0


def test_facts_are_short_printable_and_only_of_the_scheduler_that_is_there() -> None:
    assert scheduler_facts({"HOME": "/root", "JOB_NAME": "of a build server"}) == {}
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_NAME": "train", "POD_NAMESPACE": "llm"}
    assert scheduler_facts(inside) == {"kubernetes_job": "train", "kubernetes_namespace": "llm"}
    odd = {"SLURM_JOB_ID": "x" * (LONGEST + 1), "SLURM_JOB_NAME": "two\nlines", "TRACEKIT_LABEL_": "nameless"}
    assert scheduler_facts(odd) == {}
    assert len(scheduler_facts({f"TRACEKIT_LABEL_{number}": "x" for number in range(100)})) == MOST_LABELS


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_valid_and_their_commands_parse(manifest: Path) -> None:
    document = yaml.safe_load(manifest.read_text())
    kubernetes_validate.validate(document, "1.32", strict=True)
    for container in document["spec"]["template"]["spec"]["containers"]:
        words = [*container.get("command", ["tracekit"]), *container.get("args", [])]
        assert words[0] == "tracekit"
        parse(words[1:])


@pytest.mark.parametrize("name", sorted(path.name for path in SLURM.iterdir()))
def test_scripts_have_no_syntax_error_and_can_be_run(name: str) -> None:
    subprocess.run(["bash", "-n", SLURM / name], check=True)
    assert os.access(SLURM / name, os.X_OK)


def parse(words: list[str]) -> Any:
    """The command's options, parsed; raises click's error."""
    command = commands.get_command(commands.make_context("tracekit", ["--help"], resilient_parsing=True), words[0])
    assert command is not None
    return command.make_context(words[0], words[1:])
