"""An import that is killed or interrupted at any of its steps leaves the old store or the new one, never another.

A process that has imported everything, and started no thread, forks one writer after another onto the same store. Each
is hit at the next line of the code that writes the store. The random moments inside DuckDB's own code are those of
`python -m benchmarks killed`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.handmade import slow_trace
from tracekit.store import Incoming, Store

WRITERS = """
import os, shutil, sys
from pathlib import Path
import duckdb, pandas, pyarrow, polars
from tests.handmade import slow_trace
from tracekit.store import Incoming, Store

path, number, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
old = path.exists()
catalogue = path / "catalog.duckdb"
FILES = ("store/store.py", "store/folder.py", "store/catalogue.py", "store/catalogue_file.py", "/atomic_write.py")


def write(hit_at):
    lines = set()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and line not in lines:
            lines.add(line)
            if len(lines) == hit_at:
                os.kill(os.getpid(), number)
        return trace

    job = Incoming(slow_trace(), "new", "by hand")
    sys.settrace(trace)
    Store(path).add([job], replace=True)


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


hits, status, replaced = 1 - stride, None, 0
while status != 0:
    hits += stride
    before = catalogue.read_bytes() if catalogue.exists() else None
    status = fork(lambda: write(hits))
    assert status in (0, 130, -number), status
    if (catalogue.read_bytes() if catalogue.exists() else None) != before:
        assert fork(check) == 0
        replaced += status != 0
        if not old:
            shutil.rmtree(path)  # so that the next one is the first writer again
print(hits, replaced)
"""


@pytest.mark.parametrize(
    ("number", "first", "stride"),
    [(signal.SIGKILL, False, 3), (signal.SIGINT, False, 7), (signal.SIGKILL, True, 7)],
    ids=["SIGKILL", "SIGINT", "SIGKILL in the first import"],
)
def test_the_store_is_the_old_or_the_new_one(number: signal.Signals, first: bool, stride: int, tmp_path: Path) -> None:
    """And the next writer removes what was left. SIGTERM ends a process as SIGKILL does: nothing handles it."""
    store = Store(tmp_path / "jobs.store")
    if not first:
        store.add([Incoming(slow_trace(), "old", "by hand")])
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, store.path, str(int(number)), str(stride)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hits, replaced = map(int, done.stdout.split())
    assert hits > 200
    assert stride > 3 or replaced  # also hit between taking the place and the end
    store.add([Incoming(slow_trace(), "new", "by hand")], replace=True)
    assert {path.name for path in tmp_path.iterdir()} == {"jobs.store"}
    assert {path.name for path in store.path.iterdir()} == {
        "tracekit-store",
        ".catalog.duckdb.lock",
        "catalog.duckdb",
        "jobs",
    }
    assert len(list(store.path.glob("jobs/*/*"))) == len(store.jobs())
