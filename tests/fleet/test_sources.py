"""What lies where traces are looked for: links in circles, pipes, odd names, closed folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracekit
from tests.analysis.rl.logs import lines, write
from tests.fleet.few_jobs import STEPS, study_here
from tests.handmade import run, slow_trace
from tracekit.base.errors import SelectionError
from tracekit.fleet.sources import find_sources
from tracekit.fleet.study import Study


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    folder = tmp_path / "jobs"
    folder.mkdir()
    slow_trace(STEPS, name="one").write_parquet(folder / "one.parquet")
    return folder


def names(*named: object) -> list[str]:
    return [Path(source.url).name for source in find_sources(map(str, named))]


def test_links_in_circles_and_pipes_end_no_search(jobs: Path) -> None:
    (jobs / "again").symlink_to(".")
    (jobs / "within").mkdir()
    (jobs / "within" / "up").symlink_to("..")
    os.mkfifo(jobs / "pipe.parquet")
    os.mkfifo(jobs / "pipe.json")
    assert names(jobs) == ["one.parquet"]
    assert study_here(jobs / "pipe.parquet", out=jobs.parent / "study").failed == {"unreadable": 1}
    (row,) = Study(jobs.parent / "study").read("exclusions").to_dicts()
    assert row["reason"] == "a pipe, a socket or a device; expected a file"


def test_a_name_that_is_no_utf_8_is_a_job_with_escapes(jobs: Path) -> None:
    (jobs / "one.parquet").rename(jobs / os.fsdecode(b"caf\xe9.parquet"))
    summary = study_here(jobs, out=jobs.parent / "study")
    assert summary.failed == {}
    assert Study(jobs.parent / "study").read("sources")["source"].to_list() == [str(jobs / r"caf\udce9.parquet")]
    assert [one.url for one in study_here(jobs, out=jobs.parent / "study").outcomes if not one.reused] == []


def test_a_trace_that_is_named_twice_counts_once(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(jobs.parent)
    assert names("jobs", "jobs/one.parquet", jobs) == ["one.parquet"]
    with pytest.raises(SelectionError, match="no trace found"):
        names("jobs", "jobs/n*.parquet")


#: Root may read everything, unless it gives that up.
WITHOUT = ("-dac_override", "-dac_read_search")
OBEYING = (
    ["setpriv", f"--inh-caps={','.join(WITHOUT)}", f"--bounding-set={','.join(WITHOUT)}"] if not os.geteuid() else []
)


@pytest.mark.slow
def test_what_nobody_may_read_is_stated_and_the_rest_is_analysed(jobs: Path) -> None:
    for name in ("closed", "closed/within"):
        (jobs / name).mkdir()
    (jobs / "secret.parquet").write_bytes(b"")
    (jobs / "secret.json").write_bytes(b"")
    for name in ("closed", "secret.parquet", "secret.json"):
        (jobs / name).chmod(0)
    command = [sys.executable, "-m", "tracekit", "fleet", "run", jobs, "--out", jobs.parent / "study"]
    ran = subprocess.run([*OBEYING, *command], capture_output=True, text=True, check=False, timeout=120)
    (jobs / "closed").chmod(0o700)
    assert ran.returncode == 0, ran.stderr
    assert "3 unreadable: Permission denied; tried again by the next run" in ran.stdout
    left_out = Study(jobs.parent / "study").read("exclusions").select("source", "rule", "reason").rows()
    assert left_out == [
        (str(jobs / name), "unreadable", "Permission denied") for name in ("closed", "secret.json", "secret.parquet")
    ]
    assert Study(jobs.parent / "study").read("jobs")["name"].to_list() == ["one"]


@pytest.mark.slow
def test_the_last_lines_say_what_was_left_out(jobs: Path) -> None:
    (jobs / "torn.parquet").write_bytes(b"PAR1")
    slow_trace((0, 1), name="short").write_parquet(jobs / "short.parquet")
    (jobs / "gone.parquet").symlink_to("nowhere")
    report, out = jobs / "report.json", jobs.parent / "study"
    report.write_text(tracekit.job_of(slow_trace()).report.to_json())
    shown = f"a report, not a trace; `tracekit whatif {report}` shows it, but this command needs the ops of its trace"
    assert run("fleet", "run", jobs, report, "--out", out, "--processes", "1").out.splitlines() == [
        "5 sources: 2 analysed, 0 unchanged, 0 known by content",
        "  1 unreadable: No such file or directory; tried again by the next run",
        f"  2 no-trace: {report}: {shown} (and others: see the table exclusions)",
        f"  1 too-few-steps: {jobs / 'short.parquet'}: 2 steps; expected 3 or more",
        f"Next: tracekit fleet report {out}",
    ]


def test_a_run_counts_and_names_its_own_sources_and_fails_if_none_can_be_read(jobs: Path) -> None:
    torn, empty, out = jobs.parent / "torn.parquet", jobs.parent / "empty.parquet", jobs.parent / "study"
    torn.write_bytes((jobs / "one.parquet").read_bytes()[:2000])
    empty.touch()
    command = ["fleet", "run", "--out", out, "--processes", "1"]
    assert run(*command, jobs, torn).code == 0
    for _ in range(2):  # read, then known
        ran = run(*command, empty)
        assert ran.code == 2
        first, named, _ = ran.out.splitlines()
        assert first.startswith("1 source: 0 analysed, ")
        assert named.startswith(f"  1 no-trace: {empty}: ")
    assert run(*command, empty, jobs).code == 0


def test_logs_of_post_training_are_jobs_and_all_records_of_a_folder_are_one(tmp_path: Path) -> None:
    verl = "step:1 - timing_s/gen:6.0 - timing_s/step:9.0\n"
    for path, text in {"a.log": verl, "b.jsonl": json.dumps({"step": 1, "data": {"timing_s/step": 9.0}})}.items():
        (tmp_path / path).write_text(text)
    for folder in ("records", "beside"):
        (tmp_path / folder).mkdir()
        for part in (0, 1):
            write(tmp_path / folder / f"node-{part}.jsonl", lines()[part::2])
    slow_trace().write_parquet(tmp_path / "beside" / "c.parquet")
    (tmp_path / "loads.jsonl").write_text('{"expert": 1}\n')
    found = [str(Path(one.path).relative_to(tmp_path)) for one in find_sources([str(tmp_path)])]
    assert found == ["a.log", "b.jsonl", "beside/c.parquet", "beside/node-0.jsonl", "beside/node-1.jsonl", "records"]
