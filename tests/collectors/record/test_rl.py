"""`tracekit.rl`: each process writes what it was told, and no failure reaches the training."""

import json
import math
import subprocess
import sys
import threading

import numpy as np
import pytest

from tracekit import rl
from tracekit.collectors.record import rl_recorder as recorder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "_recorder", None)
    rl.record(tmp_path / "records")
    return tmp_path / "records"


def written(folder):
    """The records of each file."""
    recorder._recorder.close()
    return read(folder)


def read(folder):
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.iterdir())]


def run(script, *arguments, **environment):
    """A process of its own, with the folder as its first argument."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_a_step_of_a_loop_is_written_as_it_was(folder, monkeypatch):
    clock = iter([10.0, 14.0, 15.0, 17.5, 18.0])
    monkeypatch.setattr(recorder, "now", lambda: next(clock))
    with rl.phase("generate", step=3):
        rl.trajectory("3-0", step=3, engine="e1", submit=10.0, start=10.5, tokens=42, tool_s=0.25, version=2)
    with rl.phase("old-log-prob", step=3):
        pass
    rl.trajectory("3-1", step=3, engine="e0", submit=10.0, end=12.0, tokens=7, status="aborted")
    ((first, generate, train, part),) = written(folder)
    assert first == {
        "trajectory": "3-0", "step": 3, "engine": "e1", "submit": 10.0, "start": 10.5, "end": 14.0, "tokens": 42,
        "tool_s": 0.25, "version": 2, "status": "completed",
    }  # fmt: skip
    assert generate == {"phase": "generate", "role": "rollout", "step": 3, "start": 10.0, "end": 15.0}
    assert train == {"phase": "old-log-prob", "role": "trainer", "step": 3, "start": 17.5, "end": 18.0}
    assert (part["start"], part["end"], part["version"], part["status"]) == (10.0, 12.0, None, "aborted")


def test_a_phase_that_raises_is_recorded_and_raises(folder):
    with pytest.raises(ZeroDivisionError), rl.phase("train", step=1):
        raise ZeroDivisionError
    ((record,),) = written(folder)
    assert record["phase"] == "train"
    assert record["end"] >= record["start"]


def test_durations_survive_a_step_of_the_wall_clock(folder, monkeypatch):
    with rl.phase("train", step=0):
        monkeypatch.setattr(recorder.time, "time", lambda: 0.0)
    ((record,),) = written(folder)
    assert record["end"] >= record["start"] > 1e9


def test_many_threads_lose_nothing_and_share_a_file(folder):
    def loop(thread):
        for i in range(500):
            rl.trajectory(f"{thread}-{i}", step=i, engine="e", submit=0.0, tokens=1)

    threads = [threading.Thread(target=loop, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (records,) = written(folder)
    assert sorted(one["trajectory"] for one in records) == sorted(f"{t}-{i}" for t in range(8) for i in range(500))


def test_scalars_of_numpy_are_numbers_and_what_json_lacks_is_left_out(folder, capsys):
    rl.trajectory("a", step=np.int64(4), engine="e", submit=np.float64(1.5), tokens=np.int32(9))
    rl.trajectory("b", step=4, engine="e", submit=math.nan, tokens=1)
    rl.trajectory("c", step=4, engine=object(), submit=1.0, tokens=1)
    rl.trajectory("d", step=4, engine="e", submit=1.0, tokens=1)
    ((first, last),) = written(folder)
    assert (first["step"], first["submit"], first["tokens"], last["trajectory"]) == (4, 1.5, 9, "d")
    refused, lost = capsys.readouterr().err.splitlines()
    assert "not written (ValueError" in refused
    assert "2 records" in lost


def test_what_the_queue_cannot_hold_is_dropped_and_counted(folder, monkeypatch, capsys):
    disk, create = threading.Event(), recorder.create
    monkeypatch.setattr(recorder, "create", lambda path: disk.wait() and create(path))
    monkeypatch.setattr(recorder, "QUEUE_LIMIT", 3)
    for step in range(5):
        with rl.phase("train", step=step):
            pass
    disk.set()
    (records,) = written(folder)
    assert [one["step"] for one in records] == [0, 1, 2]
    assert "2 records" in capsys.readouterr().err


def test_another_folder_begins_another_file(folder, tmp_path):
    with rl.phase("train", step=0):
        pass
    rl.record(tmp_path / "second")
    with rl.phase("train", step=1):
        pass
    assert [one["step"] for one in written(tmp_path / "second")[0]] == [1]
    assert [one["step"] for one in read(folder)[0]] == [0]


# A file of its own, because spawn imports it.
PROCESSES = """
import multiprocessing, os, sys
from tracekit import rl

def engine(start):
    if start == "spawn":
        rl.record(sys.argv[1])
    rl.trajectory(start, step=0, engine=start, submit=rl.now(), tokens=1)

if __name__ == "__main__":
    rl.record(sys.argv[1])
    rl.trajectory("parent", step=0, engine="parent", submit=rl.now(), tokens=1)
    for start in ("fork", "spawn"):
        process = multiprocessing.get_context(start).Process(target=engine, args=(start,))
        process.start()
        process.join()
    if os.fork() == 0:
        engine("os.fork")
        sys.exit()
    os.wait()
"""


def test_every_process_writes_its_own_file(tmp_path):
    """Also those that multiprocessing ends without atexit; a fork does not repeat the records of its parent."""
    (tmp_path / "job.py").write_text(PROCESSES)
    command = [sys.executable, tmp_path / "job.py", tmp_path / "records"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    names = [[one["trajectory"] for one in records] for records in read(tmp_path / "records")]
    assert sorted(names) == [["fork"], ["os.fork"], ["parent"], ["spawn"]]


STEPS = """
import atexit, sys
if len(sys.argv) > 2:
    exec(sys.argv[2])
from tracekit import rl
if len(sys.argv) > 1:
    rl.record(sys.argv[1])
for step in range(1000):
    with rl.phase("train", step=step):
        pass
print("trained")
"""


def test_the_environment_switches_recording_on(tmp_path):
    assert run(STEPS, TRACEKIT_RL=str(tmp_path)).stdout == "trained\n"
    assert [len(records) for records in read(tmp_path)] == [1000]


def test_without_a_folder_nothing_is_recorded():
    ran = run(STEPS + "import threading; print(threading.active_count())")
    assert (ran.stdout, ran.stderr) == ("trained\n1\n", "")


#: Files may have 1,000 bytes; more is an error, as on a full disk.
FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
"""


@pytest.mark.parametrize(("folder", "before"), [("/dev/null/folder", ""), ("full", FULL)])
def test_a_failing_disk_is_one_warning(tmp_path, folder, before):
    ran = run(STEPS, tmp_path / folder, before)
    assert (ran.returncode, ran.stdout) == (0, "trained\n")
    assert ran.stderr.count("\n") == 1
    assert "recording has stopped, training continues" in ran.stderr


def test_calls_at_the_end_of_the_interpreter_do_nothing(tmp_path):
    late = "atexit.register(lambda: rl.trajectory('late', step=0, engine='e', submit=0.0, tokens=1))"
    ran = run(STEPS, tmp_path, late)  # registered first, so it runs after the file is closed
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [len(records) for records in read(tmp_path)] == [1000]


def test_it_loads_nothing_but_the_standard_library():
    loaded = "import sys; from tracekit import rl; print({'numpy', 'torch', 'polars', 'msgspec'} & set(sys.modules))"
    assert run(loaded).stdout == "set()\n"
