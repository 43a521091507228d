"""An import that is killed or interrupted at any of its steps leaves the old store or the new one, never another.

A process that has imported everything, and started no thread, forks one writer after another onto the same store. Each
is hit at a later line of the code that writes the store. SIGKILL runs no code of ours, so it comes at those lines
before which the files changed, which is every state that it can leave; SIGINT runs some, and comes at every tenth line.
The random moments inside DuckDB's own code are those of `python -m benchmarks killed`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.handmade import slow_trace
from tracekit.store import Incoming, Store

pytestmark = pytest.mark.slow

WRITERS = """
import os, shutil, signal, sys
from pathlib import Path
import duckdb, pandas, pyarrow, polars
from tests.handmade import slow_trace
from tracekit.store import Incoming, Store

path, number = Path(sys.argv[1]), int(sys.argv[2])
old = path.exists()
FILES = ("store/store.py", "store/folder.py", "store/catalogue.py", "store/catalogue_file.py", "/atomic_write.py")


def write(reach):
    # `reach` is called before each line that was not run before.
    lines = set()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and line not in lines:
            lines.add(line)
            reach(line)
        return trace

    job = Incoming(slow_trace(), "new", "by hand")
    sys.settrace(trace)
    Store(path).add([job], replace=True)


def hit_at(line):
    return lambda reached: os.kill(os.getpid(), number) if reached == line else None


def fork(work):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def check():
    jobs = Store(path).jobs()
    assert {job.name for job in jobs} == ({"old", "new"} if old else {"new"}), jobs
    assert all(Store(path).load(job.name).ops.height == 96 for job in jobs)


def files():
    return {file: file.read_bytes() for file in sorted(path.parent.rglob("*")) if file.is_file()}


def catalogue():
    file = path / "catalog.duckdb"
    return file.read_bytes() if file.exists() else None


kept = path.with_name("kept")
if old:
    shutil.copytree(path, kept)


def start_over():
    shutil.rmtree(path, ignore_errors=True)
    if old:
        shutil.copytree(kept, path)


def observe():
    # The lines, and those before which the files are others than before the line before.
    reading, writing = os.pipe()
    seen = [None]

    def reach(line):
        now = files()
        os.write(writing, repr((line, now != seen[-1])).encode() + b"\\n")
        seen.append(now)

    assert fork(lambda: write(reach)) == 0
    start_over()
    found = [eval(line) for line in os.read(reading, 65536).splitlines()]
    return [line for line, _ in found], [line for line, changed in found if changed]


lines, changes = observe()
hits = changes if number == signal.SIGKILL else lines[::10]
before, replaced = catalogue(), 0
for hit in hits:
    assert fork(lambda: write(hit_at(hit))) in (130, -number)
    if catalogue() != before:
        assert fork(check) == 0
        replaced += 1
        start_over()
    elif not old:
        start_over()  # so that the next one is the first writer again
shutil.rmtree(kept, ignore_errors=True)
print(len(lines), len(hits), replaced)
"""


@pytest.mark.parametrize(
    ("number", "first"),
    [(signal.SIGKILL, False), (signal.SIGINT, False), (signal.SIGKILL, True)],
    ids=["SIGKILL", "SIGINT", "SIGKILL in the first import"],
)
def test_the_store_is_the_old_or_the_new_one(number: signal.Signals, first: bool, tmp_path: Path) -> None:
    """And the next writer removes what was left. SIGTERM ends a process as SIGKILL does: nothing handles it."""
    store = Store(tmp_path / "jobs.store")
    if not first:
        store.add([Incoming(slow_trace(), "old", "by hand")])
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, store.path, str(int(number))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines, hits, replaced = map(int, done.stdout.split())
    assert lines > 80
    assert hits >= 5  # nothing there yet, a copy, the copy written, closed, in its place
    assert number is signal.SIGINT or replaced  # also hit between taking the place and the end
    store.add([Incoming(slow_trace(), "new", "by hand")], replace=True)
    assert {path.name for path in tmp_path.iterdir()} == {"jobs.store"}
    assert {path.name for path in store.path.iterdir()} == {
        "tracekit-store",
        ".catalog.duckdb.lock",
        "catalog.duckdb",
        "jobs",
    }
    assert len(list(store.path.glob("jobs/*/*"))) == len(store.jobs())
