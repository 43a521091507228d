"""The same study from a Ray cluster and from object storage: a real cluster, and servers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.buckets import upload
from tests.fleet.few_jobs import Here, study_here, tables, write_jobs
from tests.handmade import run
from tracekit.base.paths import located
from tracekit.fleet.sources import find_sources
from tracekit.fleet.study import Study, run_study

pytestmark = [pytest.mark.fleet, pytest.mark.filterwarnings("ignore")]  # of libraries that are not ours


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jobs(tmp_path_factory.mktemp("fleet") / "jobs")


@pytest.fixture(scope="module")
def study(jobs: Path) -> Path:
    study_here(jobs, out=jobs.parent / "study")
    return jobs.parent / "study"


ON_RAY = """
import os, signal, sys
from pathlib import Path
from tracekit.fleet.executors import RayExecutor
from tracekit.fleet.study import run_study
from tracekit.fleet.sources import find_sources
from tracekit.fleet.study import Study

killed = 0


def is_ours(pid):
    # whether it descends from this process
    while pid not in ("0", "1"):
        if int(pid) == os.getpid():
            return True
        pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return False


def progress(standing):
    # after the first outcome, end a process of Ray's that has a task
    global killed
    if standing.done >= 1 and not killed:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes()
            except OSError:
                continue
            if words.startswith(b"ray::_work") and is_ours(entry.parent.name):
                os.kill(int(entry.parent.name), signal.SIGKILL)
                killed += 1


summary = run_study(Study(Path(sys.argv[2])), find_sources([sys.argv[1]]), RayExecutor(None, 2), progress)
print(summary.sources, dict(summary.failed), killed > 0)
"""


def test_ray_makes_the_same_study_though_its_processes_are_killed(jobs: Path, study: Path, tmp_path: Path) -> None:
    out = tmp_path / "study"
    with tempfile.TemporaryDirectory() as ray_folder:  # its sockets need a short path
        environment = os.environ | {"RAY_TMPDIR": ray_folder}
        command = [sys.executable, "-c", ON_RAY, jobs, out]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "8 {} True" in ran.stdout.splitlines()  # Ray writes of processes that died, when it likes
    assert tables(out) == tables(study)


def test_no_cluster_and_no_ray_are_one_clear_error(jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = run("fleet", "run", jobs, "--out", tmp_path / "study", "--ray")
    assert ran.code == 2
    assert ran.message.endswith("a Ray cluster needs ray, which is not installed: pip install 'tracekit-analysis[ray]'")


def test_a_throttled_s3_makes_the_same_tables(jobs: Path, study: Path, tmp_path: Path, throttled_s3: None) -> None:
    """But for where the traces lie; and what has not changed there is not read again."""
    upload(jobs, "s3://traces/week")
    out = tmp_path / "study"
    assert run("fleet", "run", "s3://traces/week", "--out", out, "--processes", "2").code == 0
    assert set(Study(out).read("sources")["source"]) == {f"s3://traces/week/{path.name}" for path in jobs.iterdir()}
    of_jobs = {name: content for name, content in tables(out).items() if not name.startswith(("sources", "exclusions"))}
    assert of_jobs.items() <= tables(study).items()
    assert len(of_jobs) > 5
    again = run_study(Study(out), find_sources(["s3://traces/week"]), NoTasks())
    assert (again.unchanged, again.outcomes) == (8, [])


class NoTasks:
    """An executor that must have nothing to do."""

    def run(self, tasks: list[object], *, alone: bool = False) -> Iterator[object]:
        assert tasks == []
        del alone
        return iter(())


def test_a_study_reads_a_cloud_and_what_is_gone_there_is_a_row(jobs: Path, tmp_path: Path, cloud: str) -> None:
    upload(jobs, f"{cloud}://others/week")
    system, _ = located(f"{cloud}://others")
    with system.open_output_stream("others/week/meta.yaml") as layout:
        layout.write(b"dp_size: 2\n")
    assert {source.layout for source in find_sources([f"{cloud}://others"])} == {f"{cloud}://others/week/meta.yaml"}
    system.delete_file("others/week/meta.yaml")
    found = find_sources([f"{cloud}://others"])
    system.delete_file("others/week/healthy.parquet")
    summary = run_study(Study(tmp_path / "study"), found, Here())
    assert (len(found), summary.failed) == (8, {"unreadable": 1})
    row = Study(tmp_path / "study").read("exclusions").filter(rule="unreadable").row(0, named=True)
    assert row["source"] == f"{cloud}://others/week/healthy.parquet"
    again = run_study(Study(tmp_path / "study"), find_sources([f"{cloud}://others"]), NoTasks())
    assert (again.unchanged, again.outcomes) == (7, [])
    ran = run("fleet", "run", f"{cloud}://nowhere/at/all", "--out", tmp_path / "none")
    assert (ran.code, f"{cloud}://nowhere/at/all" in ran.message) == (2, True), ran.err
