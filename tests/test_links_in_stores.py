"""A store in which somebody has put a link, a pipe or the like in the place of a file or a folder.

Every command says so in one sentence that names it, or goes on without it; nothing that the link leads to is read into
the store, changed, moved or removed, and nothing waits for the pipe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cases import case
from tests.handmade import run, slow_trace
from tests.reports import hang_with
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.contained import Contained
from tracekit.base.errors import UnsafeFileError
from tracekit.fleet.sources import find_sources
from tracekit.fleet.study_tables import STUDY_VERSION
from tracekit.live.receivers import DeliveryLog
from tracekit.live.run import log_traceback
from tracekit.store import Incoming, Store
from tracekit.store.incidents import IncidentChange

HANG = hang_with({"rank": 1, "host": "a", "evidence": ["it waits"]}, headline="it hangs")
RECEIVER = "http://127.0.0.1/hook"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has one of every file that a store can have, and next to it a trace."""
    folder = tmp_path_factory.mktemp("whole")
    store = Store(folder / "jobs.store")
    starts = {step: 1.7e9 + step for step in range(4)}
    for number, name in enumerate(("live", "other")):
        trace = slow_trace((2 * number, 2 * number + 1), name=name, step_starts=starts)
        store.append(Incoming(trace, name, "collect", PipelineJob(trace).stored()))
    slow_trace((0,), name="new").write_parquet(folder / "new.parquet")
    store.add_hang("live", ["HANG"], HANG)
    number = store.incidents("live")[0].incident_id
    store.handle(number, IncidentChange(1.7e9, "ann", note="hers"))
    DeliveryLog(store, RECEIVER).note([(number, "opened")])
    log_traceback(store.path, "title", ValueError("x"))
    (store.path / "unfinished").write_text("77 0\n")
    (store.path / "left-out" / "then").mkdir(parents=True)
    return folder


def names(store: Path) -> list[str]:
    """Every name in a store, and those that it has at times."""
    there = [str(path.relative_to(store)) for path in sorted(store.rglob("*"))]
    return [*there, "catalog.duckdb.wal", COPY, "jobs/9", "jobs/1/1.parquet", "hangs/1.json", "told/x"]


def link_to_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "file")


def link_to_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def dangling(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nothing")


def link_to_the_same(path: Path, outside: Path) -> None:
    """To a copy of what was there, which fits."""
    path.symlink_to(outside / "copy")


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(path.parent):
        listening.bind(path.name)  # a socket's path is short


THINGS: list[Callable[[Path, Path], None]] = [
    link_to_file, link_to_folder, dangling, link_to_the_same, pipe, unix_socket
]  # fmt: skip
#: The last one is `repair`.
COMMANDS: dict[str, list[str]] = {
    "info": ["store", "list", "--store", "{store}"],
    "jobs": ["store", "sql", "SELECT job FROM jobs", "--store", "{store}"],
    "ops": ["store", "sql", "SELECT count(*) FROM ops", "--store", "{store}"],
    "windows": ["store", "windows", "live", "--store", "{store}"],
    "incidents": ["store", "incidents", "--store", "{store}"],
    "handle": ["store", "handle", "1", "--note", "mine", "--store", "{store}"],
    "hang": ["hang", "{store}", "--job", "live"],
    "top": ["store", "top", "live", "--once", "--store", "{store}"],
    "bill": ["bill", "{store}"],
    "whatif": ["whatif", "--job", "live", "--store", "{store}"],
    "check": ["store", "check", "{store}"],
    "import": ["import", "{trace}", "--store", "{store}"],
    "replace": ["import", "{trace}", "--store", "{store}", "--name", "live", "--replace"],
    "prune": ["store", "prune", "{store}", "--max-size", "0"],
    "repair": ["store", "repair", "{store}"],
}
#: Another command says that the folder is no store; nobody reads a copy.
MARK, COPY = "tracekit-store", ".tracekit.store-0"


def state(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a folder: its kind, times, links and content."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path.relative_to(folder))] = status.st_mode, status.st_mtime_ns, status.st_ino, content
    return found


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    """A command that waits for a pipe would do so for ever."""

    def waits(*_: object) -> None:
        raise TimeoutError("a command waits")

    before = signal.signal(signal.SIGALRM, waits)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def plant(whole: Path, tmp_path: Path, name: str, thing: Callable[[Path, Path], None]) -> tuple[Path, Path]:
    """A copy of the whole store with a thing in the place of `name`, and the folder that links lead to."""
    tmp_path.mkdir()
    outside, store = tmp_path / "outside", tmp_path / "jobs.store"
    (outside / "1").mkdir(parents=True)
    for file in ("file", "1/0.parquet", "0.parquet", "1.json", "rank-000000.ops"):
        (outside / file).write_text("not theirs")
    shutil.copytree(whole / "jobs.store", store, symlinks=True)
    (store / "unfinished").touch()
    path = store / name
    if path.is_dir():
        path.rename(outside / "copy")
    elif path.exists():
        shutil.copy2(path, outside / "copy")
        path.unlink()
    thing(path, outside)
    return store, outside


@pytest.mark.slow
@pytest.mark.parametrize(
    "thing", [pytest.param(thing, marks=[] if thing in (link_to_file, pipe) else pytest.mark.slow) for thing in THINGS]
)
def test_whatever_is_in_the_place_of_a_file_nothing_outside_is_touched(
    thing: Callable[[Path, Path], None], whole: Path, tmp_path: Path
) -> None:
    """Every name meets `repair` and one other command, another one for each thing."""
    reading = [*COMMANDS][:-1]
    for number, name in enumerate(names(whole / "jobs.store")):
        place = tmp_path / str(number)
        store, outside = plant(whole, place, name, thing)
        before, inode = state(outside), (store / name).lstat().st_ino
        other = reading[(number + 3 * THINGS.index(thing)) % len(reading)]
        for what in (other, "repair"):
            with case(f"{what} with {name}"):
                ran = run(*(word.format(store=store, trace=whole / "new.parquet") for word in COMMANDS[what]))
                words = ran.out + ran.err
                assert "Traceback" not in words
                assert ran.code in (0, 2, 3, 4), words
                assert state(outside) == before
                if name != COPY:  # which every writer removes, whatever it is
                    assert (store / name).lstat().st_ino == inode
                if name == MARK:
                    assert ran.code == 2
                elif ran.code == 2 or (what == "repair" and name != COPY):
                    assert f"jobs.store/{name}: is a" in words, words
        shutil.rmtree(place)


def test_a_repair_leaves_what_is_behind_a_link_and_repairs_the_rest(whole: Path, tmp_path: Path) -> None:
    store, outside = plant(whole, tmp_path / "place", "jobs/1", link_to_the_same)
    nameless = store / "jobs" / "2" / "9.parquet"
    nameless.write_text("nobody's")
    before = state(outside)
    ran = run("store", "repair", store)
    moved, refused = ran.out.splitlines()
    assert moved.startswith(f"{nameless}: moved to {store}/left-out/")
    assert refused.startswith(f"{store}/jobs/1: is a link to {outside}/copy, which is not followed")
    assert (ran.code, nameless.exists(), state(outside)) == (0, False, before)
    (store / "jobs" / "1").unlink()
    (outside / "copy").rename(store / "jobs" / "1")
    assert run("store", "check", store).code == 0
    assert [job.name for job in Store(store).jobs()] == ["other", "live"]


@pytest.mark.parametrize("name", ["handled/1", "unfinished", "told/x", "watch-errors.log"])
def test_a_file_with_a_second_name_is_not_appended_to(name: str, whole: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("theirs\n")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.hardlink_to(outside)
    with pytest.raises(UnsafeFileError, match=rf"{name}: has 2 names \(hard links\)"):
        Contained(tmp_path).append(name, b"ours\n")
    assert outside.read_text() == "theirs\n"


def test_a_study_whose_results_are_a_link_is_refused(whole: Path, tmp_path: Path) -> None:
    """A run removes what is not its own from the folder of results."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("theirs")
    (tmp_path / "study" / ".run").mkdir(parents=True)
    (tmp_path / "study" / "tracekit-study").write_text(f'{{"study_version": {STUDY_VERSION}}}')
    (tmp_path / "study" / ".run" / "results").symlink_to(outside)
    ran = run("fleet", "run", whole / "new.parquet", "--out", tmp_path / "study", "--processes", "1")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ".run/results: is a link to" in ran.err
    assert (outside / "file").read_text() == "theirs"


def test_a_fleet_leaves_out_a_window_that_is_a_link(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = plant(whole, tmp_path / "place", "jobs/1/0.parquet", link_to_the_same)
    assert [Path(source.path).parent.name for source in find_sources([str(store)])] == ["2"]
    assert "left out:" in capsys.readouterr().err
