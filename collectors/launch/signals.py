"""The signals that a launcher forwards to its command, and how it blocks them until then.

A process-wide signal goes to any thread that does not block it, also to those that numpy and polars start when they are
imported, and Python would then end the launcher by KeyboardInterrupt while the job runs. So signals are blocked before
those imports: threads inherit the mask of the thread that starts them. Imports nothing heavy for that reason.
"""

from __future__ import annotations

import signal

#: Signals that are forwarded to the command.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: Signals to the launcher that start and stop recording: `kill -s RTMIN+1 PID`. They are not forwarded.
START_RECORDING, STOP_RECORDING = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
STEERING = (START_RECORDING, STOP_RECORDING)
#: Signals the launcher waits for.
WATCHED = (*FORWARDED, *STEERING, signal.SIGCHLD)

_before: set[int] | None = None
#: True if exits of children were ignored, as some supervisors do: the command's exit code would be lost.
_ignored = False


def hold() -> None:
    """Block the signals in this thread and those it starts, and have exits of children reported. Calls nest: `release`
    restores the state before the first.
    """
    global _before, _ignored  # noqa: PLW0603  a process has one mask
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    if _before is None:
        _before = set(mask)
        _ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        if _ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def release() -> None:
    """Restore the state before the first `hold`; does nothing without one."""
    global _before  # noqa: PLW0603  a process has one mask
    if _before is not None:
        if _ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, _before)
        _before = None
