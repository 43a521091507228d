"""Ways for the recorder to fail inside a training process: a function each, called before the training starts.

`sys.midway` is called in the middle of the training (`scripts/trains.py`).
"""

import errno
import importlib
import importlib.abc
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

#: The name of the recorder inside a job.
RUNTIME = "_tracekit_recorder.collectors.record"
FAULTS = {}


def fault(function):
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


def attempt():
    """The folder of this process's attempt."""
    return Path(os.environ["TRACEKIT_COLLECT_DIR"], f"attempt-{int(os.environ['TORCHELASTIC_RESTART_COUNT']):03d}")


def own_run():
    """Give this process a run directory of its own, because the fault hits all of it."""
    folder = Path(f"run-of-{os.environ['SABOTAGE']}").absolute()
    folder.mkdir()
    os.environ["TRACEKIT_COLLECT_DIR"] = str(folder)
    return folder


def raises(error):
    def broken(*_args, **_kwargs):
        raise error

    return broken


def no_space():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Refuse(importlib.abc.MetaPathFinder):
    def __init__(self, name, error):
        self.name, self.error = name, error

    def find_spec(self, fullname, _path, _target=None):
        if fullname == self.name:
            raise self.error


def import_fails(module, error):
    def break_it():
        sys.modules.pop(f"{RUNTIME}.{module}", None)
        sys.meta_path.insert(0, Refuse(f"{RUNTIME}.{module}", error))

    return break_it


#: Modules that are imported when the training begins; what the first ones lack, the others do as well.
MODULES = (
    *("session", "install", "process_facts", "machine_state", "device"),
    *("collectives", "hooks_comm", "hooks_compute", "hooks_host"),
)
for name in MODULES:
    FAULTS[f"import-of-{name}"] = import_fails(name, ImportError(f"no module {name}"))
FAULTS["import-is-damaged"] = import_fails("session", SyntaxError("null bytes"))


# ---- torch ---------------------------------------------------------------------------------------------------------


@fault
def nothing_of_torch_is_where_it_was():
    from _tracekit_recorder.collectors.record.patches import PatchSet

    PatchSet.add = lambda *_: False


@fault
def nothing_of_torch_can_be_changed():
    from _tracekit_recorder.collectors.record.patches import Patch

    Patch.install = raises(TypeError("cannot set attribute of immutable type"))


@fault
def hooks_cannot_be_taken_out():
    from _tracekit_recorder.collectors.record.patches import PatchSet

    PatchSet.remove = raises(AttributeError("gone"))
    os.environ["TRACEKIT_COLLECT_OPTIONS"] = json.dumps({"every": 2})


@fault
def half_of_the_hooks_are_installed():
    from _tracekit_recorder.collectors.record import install

    install.FunctionalHooks = raises(LookupError("sabotage"))


@fault
def the_rank_is_unknown():
    import torch.distributed.distributed_c10d as c10d

    get_rank = c10d.get_rank

    def refuse_ours(*args):
        if sys._getframe(1).f_globals["__name__"] == f"{RUNTIME}.bootstrap":
            raise ValueError("no default group")
        return get_rank(*args)

    c10d.get_rank = refuse_ours


def every_method_raises(error):
    """What hooks call of a session, once it has started."""

    def break_it():
        from _tracekit_recorder.collectors.record import bootstrap

        start = bootstrap._start

        def sabotaged(rank, world_size):
            session = start(rank, world_size)
            for method in (
                *("begin_op", "begin_host_op", "begin_op_on", "name", "record", "record_compute", "hold", "flush_held"),
                *("optimizer_begins", "optimizer_ended", "clipping_begins", "under_way", "ended", "record_rest"),
            ):
                setattr(session, method, raises(error))
            return session

        bootstrap._start = sabotaged

    return break_it


FAULTS["hooks-raise"] = every_method_raises(LookupError("sabotage"))
FAULTS["hooks-run-out-of-memory"] = every_method_raises(MemoryError())
FAULTS["hooks-recurse"] = every_method_raises(RecursionError("maximum recursion depth exceeded"))


@fault
def the_ring_raises():
    from _tracekit_recorder.collectors.record import recorder

    open_ring = recorder.open_ring

    class Broken:
        limit, dropped, added, drained = 0, 0, 0, 0
        add = take = drain = staticmethod(raises(BufferError("sabotage")))

    recorder.open_ring = lambda *place: open_ring(*place) and Broken()


@fault
def numbers_do_not_fit():
    from _tracekit_recorder.collectors.record import session

    session.now_ns = lambda: 2**80


@fault
def facts_are_no_json():
    from _tracekit_recorder.collectors.record import recorder

    recorder.json = type("json", (), {"dumps": staticmethod(raises(TypeError("not serializable")))})


# ---- threads -------------------------------------------------------------------------------------------------------


@fault
def no_thread_can_start():
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("tracekit"):
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse


@fault
def the_writer_dies():
    from _tracekit_recorder.collectors.record.recorder import Recorder

    Recorder._run = lambda _: None


@fault
def the_writer_hangs():
    from _tracekit_recorder.collectors.record import recorder

    recorder.CLOSE_TIMEOUT_S = 0.05
    recorder.Recorder._drain = lambda _: threading.Event().wait()


@fault
def the_ring_is_full():
    from _tracekit_recorder.collectors.record.recorder import Recorder

    os.environ["TRACEKIT_COLLECT_OPTIONS"] = json.dumps({"ring_capacity": 4})
    Recorder._drain = lambda _: None


# ---- disk and memory -----------------------------------------------------------------------------------------------


def writing_fails(*errors):
    """Each write of the recorder raises the next of these; None: it writes half."""

    def break_it():
        from _tracekit_recorder.collectors.record import recorder

        write, left = recorder.write_all, list(errors)

        def broken(file, data):
            error = left.pop(0) if len(left) > 1 else left[0]
            write(file, data[: len(data) // 2])
            if error:
                raise error

        recorder.write_all = broken

    return break_it


FAULTS["disk-is-full"] = writing_fails(no_space())
FAULTS["disk-fills-up"] = writing_fails(None, None, no_space())
FAULTS["disk-is-broken"] = writing_fails(OSError(errno.EIO, "Input/output error"))


@fault
def files_cannot_be_made():
    from _tracekit_recorder.collectors.record import recorder

    recorder.create = raises(OSError(errno.EROFS, os.strerror(errno.EROFS)))


@fault
def segments_cannot_be_sealed():
    from _tracekit_recorder.collectors.record import recorder

    recorder.os = type("os", (), {"fsync": staticmethod(raises(no_space())), "getpid": os.getpid})


@fault
def folder_cannot_be_made():
    own_run().rmdir()


@fault
def folder_is_a_file():
    folder = own_run()
    folder.rmdir()
    folder.touch()


@fault
def folder_is_a_link():
    target = own_run() / "elsewhere"
    target.mkdir()
    attempt().symlink_to(target)


@fault
def folder_is_removed():
    folder = own_run()
    sys.midway = lambda: folder.rename(f"{folder}-gone")


def without_rights():
    """Give up what lets root write where the permissions do not."""
    import ctypes

    version, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(version, nothing):
        raise OSError(ctypes.get_errno(), "capset")


@fault
def folder_is_read_only():
    own_run().chmod(0o555)
    without_rights()


@fault
def folder_becomes_read_only():
    folder = own_run()
    os.environ["TRACEKIT_COLLECT_OPTIONS"] = json.dumps({"records_per_segment": 8})
    without_rights()

    def make_read_only():
        attempt().chmod(0o555)
        folder.chmod(0o555)

    sys.midway = make_read_only


@fault
def files_may_not_grow():
    sys.midway = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))


@fault
def no_file_can_be_opened():
    """The process may have no more descriptors than it has; those that it closes are not given again."""
    os.environ["TRACEKIT_COLLECT_OPTIONS"] = json.dumps({"records_per_segment": 8})
    sys.midway = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


@fault
def claims_are_pipes():
    attempt().mkdir(exist_ok=True)
    os.mkfifo(attempt() / "rank-000000.claim")


@fault
def facts_are_a_pipe():
    attempt().mkdir(exist_ok=True)
    os.mkfifo(attempt() / "rank-000000.facts")


@fault
def every_file_is_a_link():
    attempt().mkdir(exist_ok=True)
    victim = Path("victim").absolute()
    victim.write_text("precious")
    for name in (".facts", "-00000000.open", ".gpu", ".pulse", ".stacks", ".last"):
        (attempt() / f"rank-000000{name}").symlink_to(victim)


@fault
def memory_is_unreachable():
    os.environ["TRACEKIT_COLLECT_RINGS"] = "/proc/1/fd/999"


@fault
def memory_is_a_device():
    os.environ["TRACEKIT_COLLECT_RINGS"] = "/dev/zero"


@fault
def memory_cannot_be_mapped():
    mmap.mmap = raises(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))


# ---- clocks and the system -----------------------------------------------------------------------------------------


@fault
def clocks_raise():
    from _tracekit_recorder.collectors.record import session

    def break_them():
        for module in (name for name in list(sys.modules) if name.startswith(RUNTIME)):
            for clock in ("now_ns", "monotonic_ns"):
                if hasattr(sys.modules[module], clock):
                    setattr(sys.modules[module], clock, raises(OSError(errno.EINVAL, "clock_gettime")))

    session.now_ns = time.monotonic_ns
    sys.midway = break_them


@fault
def clocks_go_back():
    from _tracekit_recorder.collectors.record import session

    times = iter(range(10**12, 0, -(10**6)))
    session.now_ns = lambda: next(times)


@fault
def thread_clock_raises():
    time.thread_time_ns = raises(OSError(errno.EINVAL, "clock_gettime"))


@fault
def wall_clock_raises():
    time.time_ns = raises(OverflowError("timestamp out of range"))


@fault
def kernel_accounts_are_garbage():
    from _tracekit_recorder.collectors.record.process_facts import RunQueue

    RunQueue.waited_ns = raises(IndexError("list index out of range"))


@fault
def host_has_no_name():
    socket.gethostname = raises(OSError(errno.ENAMETOOLONG, "gethostname"))


@fault
def stderr_is_full():
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 2)
    FAULTS["hooks-raise"]()


@fault
def stderr_is_closed():
    sys.stderr = None
    FAULTS["disk-is-full"]()


# ---- what the launcher and users say -------------------------------------------------------------------------------


@fault
def options_are_damaged():
    os.environ["TRACEKIT_COLLECT_OPTIONS"] = "{" * 5000


@fault
def options_are_of_another_version():
    os.environ["TRACEKIT_COLLECT_OPTIONS"] = json.dumps({"colour": "blue"})


@fault
def attempt_is_no_number():
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "first"


def control_file(make):
    """A control file that `make` makes while the job runs; the training goes on once it has been looked at."""

    def break_it():
        from _tracekit_recorder.collectors.record import bootstrap, recorder, small_file

        folder, looked = own_run(), threading.Event()
        recorder.FLUSH_INTERVAL_S = 0.001
        small_file.FOLLOWING_PERIOD_S = 0
        look = bootstrap.Control.look

        def look_and_tell(follower):
            look(follower)
            if (folder / "control.json").is_symlink() or (folder / "control.json").exists():
                looked.set()

        def write_and_wait():
            make(folder / "control.json")
            looked.wait(20)

        bootstrap.Control.look = look_and_tell
        sys.midway = write_and_wait

    return break_it


FAULTS["control-file-of-brackets"] = control_file(lambda path: path.write_text("[" * 200_000))
FAULTS["control-file-nested"] = control_file(lambda path: path.write_text("[" * 60_000))
FAULTS["control-file-is-a-pipe"] = control_file(os.mkfifo)
FAULTS["control-file-without-end"] = control_file(lambda path: path.symlink_to("/dev/zero"))
FAULTS["control-file-is-a-folder"] = control_file(Path.mkdir)


@fault
def control_raises():
    from _tracekit_recorder.collectors.record.bootstrap import Control

    Control.look = raises(ArithmeticError("sabotage"))


@fault
def profiler_cannot_start():
    import torch.profiler

    torch.profiler.profile.start = raises(RuntimeError("CUPTI"))
    os.environ["TRACEKIT_COLLECT_OPTIONS"] = json.dumps({"profiler_steps": 2, "profiler_folder": "/dev/null/x"})


@fault
def profiler_cannot_write():
    os.environ["TRACEKIT_COLLECT_OPTIONS"] = json.dumps({"profiler_steps": 2, "profiler_folder": "/dev/null/x"})


# ---- the end -------------------------------------------------------------------------------------------------------


@fault
def the_end_raises():
    from _tracekit_recorder.collectors.record.session import Session

    Session._finish = raises(LookupError("sabotage"))


@fault
def closing_raises():
    from _tracekit_recorder.collectors.record.recorder import Recorder

    Recorder.close = raises(RuntimeError("cannot join thread before it is started"))


@fault
def users_exit_first():
    import atexit

    from _tracekit_recorder.collectors.record import bootstrap

    atexit.register(lambda: bootstrap._session.recorder.close({}))  # runs before ours if registered later
    sys.midway = lambda: atexit.register(bootstrap._session.close)


@fault
def callbacks_never_come():
    from _tracekit_recorder.collectors.record import collectives

    collectives.TIMEOUT_S = 0.05
    collectives._Callback.__del__ = lambda _: None


@fault
def callbacks_raise():
    from _tracekit_recorder.collectors.record import collectives

    collectives._Callback.__call__ = raises(LookupError("sabotage"))


def signalled(number, **handlers):
    """A signal to the rank in the middle of the training."""

    def break_it():
        for name, handler in handlers.items():
            signal.signal(getattr(signal, name), handler)
        sys.midway = lambda: os.kill(os.getpid(), number)

    return break_it


#: They end the training, in the same way with and without a recorder.
SIGNALS = {
    "interrupted": signalled(signal.SIGINT),
    "terminated": signalled(signal.SIGTERM),
    "hung-up": signalled(signal.SIGHUP),
    "terminated-with-a-handler": signalled(signal.SIGTERM, SIGTERM=lambda *_: sys.exit(9)),
    "user-signal": signalled(signal.SIGUSR1, SIGUSR1=lambda *_: None),
}
FAULTS |= SIGNALS
#: Faults that take the same way through the recorder as another one.
ALIKE = {
    *(f"import-of-{module}" for module in MODULES if module not in {"session", "hooks_reducer"}),
    *("hooks-recurse", "disk-is-broken", "folder-is-a-file", "memory-is-a-device", "profiler-cannot-start"),
    *("control-file-of-brackets", "control-file-without-end", "control-file-is-a-folder"),
    *("callbacks-never-come", "hung-up", "user-signal"),
}
#: What `make test-all` tries; `python -m benchmarks faults` tries all.
TESTED = tuple(name for name in FAULTS if name not in ALIKE)
#: These can cost nothing at all.
UNNOTICED = frozenset({"memory-is-unreachable", "callbacks-raise", "users-exit-first", "the-rank-is-unknown"})


def function_raises(module, name):
    """`Class.method` or a function of a module of the recorder raises whenever it is called."""
    owner = importlib.import_module(f"{RUNTIME}.{module}")
    *classes, last = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    setattr(owner, last, raises(LookupError("sabotage")))


def sabotage(name):
    if ":" in name:
        function_raises(*name.split(":"))
    else:
        FAULTS.get(name, lambda: None)()
