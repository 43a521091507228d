"""Starts tracekit's recorder in a process of a job, or says once per job why it cannot.

`tracekit collect` puts this folder on the job's PYTHONPATH. There are two ways in, because each can be switched off:
`sitecustomize`, which every Python runs at its start, and an entry point that torch runs at the end of its import.

This module is the root of a package, too: the recorder is loaded from the files around it, but under names that no job
has (`_tracekit_recorder.collectors...`). The job may call its own modules `tracekit`, and may use any Python, without
tracekit or older than it. Nothing is loaded before torch is: imports only what every Python has loaded when it starts,
and never raises.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ENV_DIRECTORY = "TRACEKIT_COLLECT_DIR"
#: The file in the run directory with the first reason why a process is not recorded.
REASON_FILE = "unrecorded.txt"
OLDEST_PYTHON = (3, 9)

_sources = __file__.rsplit(os.sep, 4)[0]
#: `collectors` and `base` are next to each other once installed; in a checkout, `base` is one folder deeper.
__path__ = [_sources, _sources + os.sep + "tracekit"]
_started = False


def arm() -> None:
    """Start the recorder: at once if torch has been imported, otherwise when torch imports what trains."""
    if ENV_DIRECTORY not in os.environ:
        return
    if "torch" in sys.modules:
        _start()
    else:
        sys.meta_path.insert(0, _AtTorch())


def warn(text: str) -> None:
    """Write a line to stderr, which can be closed or full."""
    try:  # noqa: SIM105  contextlib is not loaded yet
        sys.stderr.write("tracekit: " + text + "\n")
    except Exception:  # noqa: S110
        pass


def first_to_say(reason: str) -> bool:
    """Keep why a process is not recorded for the launcher; False if one of the job has already given a reason."""
    try:
        with open(os.environ[ENV_DIRECTORY] + os.sep + REASON_FILE, "x", encoding="utf-8") as file:
            file.write(reason)
    except FileExistsError:
        return False
    except (KeyError, OSError, ValueError):  # the folder is gone or cannot be written: every process says it
        return True
    return True


def load(name: str) -> "Any":
    """The module of the recorder that is `tracekit.<name>` elsewhere. Raises whatever its import raises."""
    if sys.version_info < OLDEST_PYTHON:
        raise ImportError("it needs Python 3.9 or later")
    return __import__("_tracekit_recorder." + name, fromlist=["__name__"])


def _start() -> None:
    global _started  # noqa: PLW0603  a process has two ways in
    if _started:
        return
    _started = True
    try:
        load("collectors.record.bootstrap").arm()
    except (Exception, SystemExit) as error:
        python = sys.executable or "python"
        reason = f"{python} cannot start tracekit's recorder ({type(error).__name__}: {error!s:.200})"
        if first_to_say(reason):
            warn(reason + ", so training continues without being recorded")


class _AtTorch:
    """A finder that finds nothing: it starts the recorder when torch is about to import what trains."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002  a finder's
        if name in ("torch.optim", "torch.distributed"):
            _start()
