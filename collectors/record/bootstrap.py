"""Starts recording in a process that `tracekit collect` launched.

In: the environment the launcher set. Out: one active `Session` in each training process, none in others: the
elastic agent, data-loader workers and resource trackers run this too. torch is never imported from here; modules are
patched when the process itself imports them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from . import spans
from .inject._tracekit_recorder import first_to_say, warn
from .patches import on_import
from .recorder import Recorder
from .small_file import FollowedFile, read_small
from .wire_format import (
    CONTROL_FILE,
    ENV_DIRECTORY,
    ENV_OPTIONS,
    ENV_RINGS,
    RecordingSchedule,
    RuntimeOptions,
    attempt_directory,
    rank_stem,
)

#: Variables with the number of processes: of torchrun, srun, Open MPI, MPICH and its relatives, and MVAPICH.
_SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_tried = False
_session: Any = None


def arm() -> None:
    """Watch for the imports that identify a training process. Called once, by `_tracekit_recorder`."""
    on_import("torch.distributed.distributed_c10d", _guarded(_watch_process_group))
    on_import("torch.optim.optimizer", _guarded(_watch_optimizer))
    os.register_at_fork(after_in_child=_off_in_child)


def _not_recorded(reason: str) -> None:
    """Report why this process is not recorded: one line per job, which the launcher repeats if nothing was recorded."""
    if first_to_say(reason):
        warn(f"{reason}; this process is not recorded, training continues")


def _guarded(callback: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """`callback` with exceptions turned into a warning."""

    def call(module: ModuleType) -> None:
        try:
            callback(module)
        except Exception as error:
            _not_recorded(f"hooks for {module.__name__} cannot be installed ({type(error).__name__}: {error!s:.200})")

    return call


def _off_in_child() -> None:
    """Record nothing in a forked child, which shares the parent's files and counters."""
    spans.attach(spans.NO_SINK)
    if _session is not None:
        _session.recording = False
        _session.recorder.abandon()


def _watch_process_group(module: ModuleType) -> None:
    """Start recording once the process has joined a process group, which makes it a training process."""
    original = module.init_process_group
    joined = _guarded(lambda module: activate(module.get_rank(), module.get_world_size()))

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        joined(module)
        return result

    _replace(module, "init_process_group", init_process_group)
    destroy = module.destroy_process_group

    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        if _session is not None:
            _session.attempt_hook("process-group-ends", _session.process_group_ends)
        return destroy(*args, **kwargs)

    _replace(module, "destroy_process_group", destroy_process_group)


def _replace(module: ModuleType, name: str, wrapper: Any) -> None:
    """Replace a function of `torch.distributed` by `wrapper`."""
    original = getattr(module, name)
    wrapper.__wrapped__, wrapper.__doc__ = original, original.__doc__
    setattr(module, name, wrapper)
    package = sys.modules.get("torch.distributed")
    if package is not None and getattr(package, name, None) is original:
        setattr(package, name, wrapper)


def _one_of_many() -> bool:
    """True if, according to the launcher, this process is one of several that will join a process group."""
    sizes = (os.environ.get(name, "1") for name in _SIZES)
    return any(size.isdecimal() and int(size) > 1 for size in sizes)


def _watch_optimizer(module: ModuleType) -> None:
    """Record a process that creates an optimizer without a process group as a training process of one rank."""
    optimizer = module.Optimizer
    original = optimizer.__init__
    trains = _guarded(lambda _: None if _one_of_many() else activate(0, 1))

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not _tried:
            trains(module)

    init.__wrapped__ = original  # type: ignore[attr-defined]
    optimizer.__init__ = init


def activate(rank: int, world_size: int) -> None:
    """Start recording this process as `rank`, unless another process of this attempt already has that rank."""
    global _session, _tried  # noqa: PLW0603  once per process
    if _tried:
        return
    try:
        _session = _start(rank, world_size)
        _tried = _session is not None
    except Exception as error:
        _tried = True
        _not_recorded(f"rank {rank} cannot start its recorder ({type(error).__name__}: {error!s:.200})")


def _claimed(directory: Path, rank: int) -> bool:
    """Claim `rank` for this process; False if another process of this attempt already has it.

    The claim names the launcher of that process. If it is another launcher, the process belongs to another job.
    """
    launcher = f"{socket.gethostname()} {os.environ.get(ENV_RINGS)}".encode()
    claim = directory / f"{rank_stem(rank)}.claim"
    try:
        with claim.open("xb") as file:
            file.write(launcher)
    except FileExistsError:
        claimed_by = read_small(claim)
        if claimed_by and claimed_by != launcher:
            with contextlib.suppress(FileExistsError):
                (directory / "other-job.claim").touch(exist_ok=False)  # only one rank reports it
                warn(
                    f"{directory.parent}: another job records here; give each job a folder of its own (--segments);"
                    " this process is not recorded, training continues"
                )
        return False
    return True


def _options() -> RuntimeOptions:
    try:
        return RuntimeOptions(**json.loads(os.environ.get(ENV_OPTIONS, "{}")))
    except TypeError as error:
        raise ValueError(f"{error}: this Python has another version of tracekit than the launcher") from None


def _start(rank: int, world_size: int) -> Any:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    directory = attempt_directory(Path(os.environ[ENV_DIRECTORY]), attempt)
    with contextlib.suppress(FileExistsError):
        directory.mkdir()  # not its parent: if that is gone, so is the run
    if not stat.S_ISDIR(directory.lstat().st_mode):
        raise NotADirectoryError(f"{directory} is no folder")
    if not _claimed(directory, rank):
        return None
    options = _options()
    from .install import install_hooks
    from .session import Session

    recorder = Recorder(directory, rank, attempt, options)
    session = Session(recorder, options, rank=rank, world_size=world_size, attempt=attempt)
    apply = functools.partial(setattr, session, "schedule")
    recorder.between.append(Control(directory.parent, apply, recorder.first_of_all_ranks).look)
    if options.stacks:
        from .stack_samples import StackSampler

        recorder.between.append(StackSampler(session, directory).look)
    session.start()  # raises if the process may start no more threads: then no hooks are installed either
    try:
        install_hooks(session)
        if options.hang_after_s > 0 and world_size > 1:
            from .hang_watch import HangWatch

            session.install("the watch for hangs", HangWatch(session, directory).start, lacks="reports on hangs")
        atexit.register(session.close)
        spans.attach(session)
    except BaseException:
        session.give_up()
        raise
    return session


class Control:
    """Follows the control file of a run and hands each new schedule to `apply`.

    `first_to_say`: returns True if this rank is the first to report something.
    """

    def __init__(
        self,
        directory: Path,
        apply: Callable[[RecordingSchedule], None],
        first_to_say: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._file = FollowedFile(directory / CONTROL_FILE)
        self._apply, self._first_to_say = apply, first_to_say

    def look(self) -> None:
        """Check for a new schedule; cheap enough to call in a loop."""
        try:
            content = self._file.new_content()
            if content is not None:
                self._apply(RecordingSchedule.parse(content))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            if self._first_to_say(f"control-{self._file.changed_ns}"):
                warn(f"{self._file.path}: {why}; recording continues as before")
