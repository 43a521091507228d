"""An import of many traces: in processes, some at a time, and again after it ended early."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.handmade import run, slow_trace
from tracekit.base.errors import SelectionError
from tracekit.base.processes import answers_of
from tracekit.commands import record
from tracekit.store import Store

JOBS = [f"{number:03}" for number in range(7)]


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a hundred-op trace for each of `JOBS`, which are imported five at a time, in this process."""
    monkeypatch.setattr(record, "_TOGETHER", 5)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "many"
    folder.mkdir()
    for name in JOBS:
        slow_trace(name=name).write_parquet(folder / f"{name}.parquet")
    return folder


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs are many enough for processes of their own, as a few are."""
    monkeypatch.setattr(record, "_FEW", 3)


def stored() -> list[str]:
    return sorted(job.name for job in Store(Path("tracekit.store")).jobs())


@pytest.mark.usefixtures("apart")
def test_what_was_stored_before_a_bad_trace_stays_and_the_same_command_goes_on(many: Path) -> None:
    whole = (many / "005.parquet").read_bytes()
    (many / "005.parquet").write_bytes(whole[:100])
    ended = run("import", "many", "--no-analysis")
    assert ended.code == 2
    assert "005.parquet" in ended.err
    assert ended.err.endswith("; the 5 jobs before it are stored, and the same command goes on\n")
    assert stored() == JOBS[:5]
    (many / "005.parquet").write_bytes(whole)
    again = run("import", "many", "--no-analysis")
    assert again.code == 0, again.err
    assert again.out.splitlines()[0] == "5 of 7 jobs are in the store already"
    assert [line.split()[1] for line in again.out.splitlines()[1:-1]] == JOBS[5:]
    assert stored() == JOBS


def test_what_is_something_else_than_a_trace_is_named_with_what_is_stored(many: Path) -> None:
    (many / "005.parquet").unlink()
    whatif = run("whatif", "many/000.parquet", "--json")
    (many / "005.json").write_text(whatif.out)
    paths = sorted(map(str, Path("many").iterdir()))
    ended = run("import", *paths, "--no-analysis")
    assert ended.code == 2
    assert "005.json" in ended.err
    assert "the 5 jobs before it are stored" in ended.err


def test_files_of_the_same_names_in_another_folder_or_since_changed_are_not_taken_for_stored(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("import", "many", "--no-analysis").code == 0
    slow_trace(range(3), name="003").write_parquet(many / "003.parquet")
    os.utime(many / "003.parquet", (4e9, 4e9))
    changed = run("import", "many", "--no-analysis")
    assert (changed.code, changed.out) == (2, "6 of 7 jobs are in the store already\n")
    assert "already has a job '003'" in changed.err
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(many, tmp_path / "elsewhere" / "many")
    monkeypatch.chdir(tmp_path / "elsewhere")
    other = run("import", "many", "--no-analysis", "--store", tmp_path / "tracekit.store")
    assert (other.code, other.out) == (2, "")
    assert "already has a job '000'" in other.err


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_processes_store_the_reports_that_one_would(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [f"many/{name}.parquet" for name in JOBS]
    assert run("import", *paths, "--store", "apart.store").code == 0
    monkeypatch.setattr(record, "_FEW", len(JOBS) + 1)
    assert run("import", *paths, "--store", "here.store").code == 0
    apart, here = (
        {path.relative_to(store).as_posix(): path.read_bytes() for path in Path(store).rglob("*.report.json")}
        for store in ("apart.store", "here.store")
    )
    assert len(apart) == len(paths)
    assert apart == here


def test_answers_keep_the_order_of_their_tasks_and_an_error_is_raised_here() -> None:
    code = """
from tracekit.base.errors import SelectionError
from tracekit.base.errors import SelectionError
from tracekit.base.processes import serve

def half(number):
    print("a library prints")
    if number % 2:
        raise SelectionError(f"{number} is odd")
    return number // 2

serve(half)
"""
    assert list(answers_of(code, range(0, 40, 2), 3)) == [*range(20)]
    answers = answers_of(code, [4, 3, 2], 2)
    assert next(answers) == 2
    with pytest.raises(SelectionError, match="3 is odd"):
        list(answers)
