"""What runs in the training process: light imports, spans, patches, Megatron's own words."""

import errno
import os
import subprocess
import sys
import types

import pytest

import tracekit
from tests.collectors.conftest import HEAVY, environment
from tracekit.collectors import set_step, span
from tracekit.collectors.record import bootstrap, small_file, spans
from tracekit.collectors.record.patches import PatchSet, on_import
from tracekit.collectors.record.wire_format import ENV_RINGS, IDLE, RecordingSchedule, RuntimeOptions


def test_imports_stay_light():
    """Neither the public names nor the bootstrap import torch or anything heavy."""
    imported = "tracekit.collectors, tracekit.collectors.record.bootstrap, tracekit; tracekit.span"
    code = f"import sys, {imported}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert not (HEAVY | {"torch", "numpy"}) & set(done.stdout.split())


def test_the_ranks_of_another_job_in_one_folder_say_so_once(tmp_path, monkeypatch, capsys):
    """A second process of a rank is nothing unusual, until it has another launcher."""
    monkeypatch.setenv(ENV_RINGS, "/proc/1/fd/7")
    assert bootstrap._claimed(tmp_path, 0)
    assert bootstrap._claimed(tmp_path, 1)
    assert not bootstrap._claimed(tmp_path, 0)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(ENV_RINGS, "/proc/2/fd/7")
    assert not bootstrap._claimed(tmp_path, 0)
    assert not bootstrap._claimed(tmp_path, 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert "another job records here; give each job a folder of its own (--segments)" in line
    assert bootstrap._claimed(tmp_path, 2)  # a rank of another node has its own launcher


def test_a_rank_that_may_not_start_a_thread_trains_without_hooks(tmp_path, monkeypatch, capsys):
    """As in a container whose limit of processes is reached (`pids.max`)."""
    from tracekit.collectors.record import install, recorder

    def refuse(_recorder):
        raise RuntimeError("can't start new thread")

    hooked = []
    monkeypatch.setenv("TRACEKIT_COLLECT_DIR", str(tmp_path))
    monkeypatch.setattr(recorder.Recorder, "start", refuse)
    monkeypatch.setattr(install, "install_hooks", hooked.append)
    bootstrap.activate(0, 1)
    assert (bootstrap._session, hooked) == (None, [])
    assert "rank 0 cannot start its recorder (RuntimeError: can't start new thread)" in capsys.readouterr().err


class Sink:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def begin_span(self, _):
        return 7

    def end_span(self, name, start_ns):
        self.told.append((name, start_ns))

    def set_step(self, step):
        self.told.append(step)

    def begin_step(self):
        self.told.append("next")


@pytest.fixture
def sink(monkeypatch):
    """A collector that listens, in a process that `tracekit collect` started."""
    made = Sink()
    monkeypatch.setattr(spans, "_under_collect", True)
    spans.attach(made)
    yield made
    spans.attach(spans.NO_SINK)


def test_spans_are_no_ops_outside_collect():
    """A block, a decorated function, a step: all run as if nothing were there."""

    @span("work")
    def double(x):
        """Twice."""
        return 2 * x

    with span("block"):
        assert double(4) == 8
    with pytest.raises(KeyError), span("block"):
        raise KeyError("x")
    set_step(3)
    with tracekit.step():
        assert double(2) == 4
    assert tracekit.span is span
    assert double.__doc__ == "Twice."


def test_spans_reach_the_collector_and_close_on_exceptions(sink):
    """Blocks and calls, in order of their end, even where they raise."""

    @span("call")
    def fail():
        raise KeyError("x")

    with span("outer"), pytest.raises(KeyError):
        fail()
    set_step(12)
    with tracekit.step(), tracekit.span("inner"):
        pass
    assert sink.told == [("call", 7), ("outer", 7), 12, "next", ("inner", 7)]


def test_patches_come_and_go():
    """Removed, the attribute is the very object it was."""

    class Owner:
        def method(self):
            return 1

    original = Owner.__dict__["method"]
    patches = PatchSet()
    assert patches.add(Owner, "method", lambda inner: lambda self: inner(self) + 1)
    assert not patches.add(Owner, "no_such_method", lambda inner: inner)
    assert Owner().method() == 2
    patches.remove()
    assert Owner.__dict__["method"] is original
    patches.install()
    patches.install()
    assert Owner().method() == 2


def test_imports_are_watched(tmp_path, monkeypatch):
    """The callback comes once, after the module has run; at once where it already has."""
    (tmp_path / "watched_by_tracekit.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen = []
    on_import("watched_by_tracekit", lambda module: seen.append(module.value))
    assert seen == []
    import watched_by_tracekit  # noqa: F401

    assert seen == [5]
    on_import("watched_by_tracekit", lambda module: seen.append(-module.value))
    assert seen == [5, -5]
    monkeypatch.delitem(sys.modules, "watched_by_tracekit")


def test_which_steps_are_recorded():
    for options, expected in (
        ({}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"first_step": 3, "last_step": 6}, [3, 4, 5]),
        ({"first_step": 2, "every": 3}, [2, 5, 8]),
        ({"every": 4, "length": 2}, [1, 2, 5, 6]),
        ({"first_step": IDLE.first_step, "last_step": IDLE.last_step}, []),
    ):
        chosen = RuntimeOptions(**options).schedule
        assert [step for step in range(9) if chosen.records(step)] == expected


def test_the_control_file_changes_the_schedule(tmp_path, capfd, monkeypatch):
    """Each new file counts; one that is no schedule is named, and the schedule before stays."""
    monkeypatch.setattr(small_file, "FOLLOWING_PERIOD_S", 0)
    applied = []
    follower = bootstrap.Control(tmp_path, applied.append)
    file = tmp_path / "control.json"
    follower.look()
    contents = ['{"first_step": 7}', '{"first_step": -1}', "[1]", "{", '{"last_step": 9, "every": 3, "length": 2}']
    for number, content in enumerate(contents):
        file.write_text(content)
        os.utime(file, ns=(number, number))
        follower.look()
        follower.look()
    assert applied == [RecordingSchedule(first_step=7), RecordingSchedule(last_step=9, every=3, length=2)]
    assert capfd.readouterr().err.count("control.json: ") == 3


def test_a_file_that_could_not_be_read_is_read_later_and_reported_once(tmp_path, monkeypatch):
    """As on a shared folder that fails for a moment: the version counts as news until it has been read."""
    monkeypatch.setattr(small_file, "FOLLOWING_PERIOD_S", 0)
    file = tmp_path / "control.json"
    file.write_text("{}")
    followed, read = small_file.FollowedFile(file), small_file.read_small

    def fails(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(small_file, "read_small", fails)
    with pytest.raises(OSError, match="Input/output error"):
        followed.new_content()
    assert followed.new_content() is None
    monkeypatch.setattr(small_file, "read_small", read)
    assert followed.new_content() == b"{}"
    assert followed.new_content() is None


#: What is no schedule, in the place of one -> what the line says.
NO_SCHEDULE = {
    "brackets": (lambda path: path.write_text("[" * 200_000), "more than 65,536 bytes"),
    "fewer brackets": (lambda path: path.write_text("[" * 60_000), "JSON with thousands of brackets"),
    "pipe": (os.mkfifo, "not a regular file"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "a link, which is not followed"),
    "folder": (lambda path: path.mkdir(), "not a regular file"),
    "bytes": (lambda path: path.write_bytes(b"\xff\xfe\xfd"), "decode"),
}


@pytest.mark.parametrize("name", NO_SCHEDULE)
def test_what_is_no_control_file_is_reported_once_for_all_ranks_and_ignored(name, tmp_path, capfd, monkeypatch):
    """Nothing waits for it or fills the memory, and the next schedule counts."""
    monkeypatch.setattr(small_file, "FOLLOWING_PERIOD_S", 0)
    make, why = NO_SCHEDULE[name]
    applied, said = [], set()

    def first_to_say(what):
        return what not in said and not said.add(what)

    ranks = [bootstrap.Control(tmp_path, applied.append, first_to_say) for _ in range(2)]
    make(tmp_path / "control.json")
    for rank in (*ranks, *ranks):
        rank.look()
    (line,) = capfd.readouterr().err.splitlines()
    assert why in line
    (tmp_path / "good").write_text('{"first_step": 7}')
    if name == "folder":
        (tmp_path / "control.json").rmdir()
    (tmp_path / "good").rename(tmp_path / "control.json")
    for rank in ranks:
        rank.look()
    assert applied == [RecordingSchedule(first_step=7)] * 2


def test_the_module_type_is_all_a_patch_needs():
    """Patches work on modules as on classes."""
    module = types.ModuleType("made_up")
    module.function = lambda: 1
    original = module.function
    patches = PatchSet()
    patches.add(module, "function", lambda inner: lambda: inner() + 1)
    assert module.function() == 2
    patches.remove()
    assert module.function is original
