"""Starts tracekit's recorder in a process of a job, or says once per job why it cannot.

`tracekit collect` puts this folder on the job's PYTHONPATH. There are two ways in, because each can be switched off:
`sitecustomize`, which every Python runs at its start, and an entry point that torch runs at the end of its import. The
job may use any Python, without tracekit or older than it: imports nothing else of tracekit's, and never raises.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import sys
from typing import Any

ENV_DIRECTORY = "TRACEKIT_COLLECT_DIR"
#: The file in the run directory with the first reason why a process is not recorded.
REASON_FILE = "unrecorded.txt"

_reported = False


def arm() -> None:
    """Start the recorder. If that fails, try again as torch is imported: scripts extend the path until then."""
    error = _start()
    if error is None:
        return
    if "torch" in sys.modules:
        _report(error)
    else:
        sys.meta_path.insert(0, _AtTorch())


def warn(text: str) -> None:
    """Write a line to stderr, which can be closed or full."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"tracekit: {text}\n")


def first_to_say(reason: str) -> bool:
    """Keep why a process is not recorded for the launcher; False if one of the job has already given a reason."""
    try:
        with open(os.path.join(os.environ[ENV_DIRECTORY], REASON_FILE), "x", encoding="utf-8") as file:  # noqa: PTH118
            file.write(reason)
    except FileExistsError:
        return False
    except (KeyError, OSError, ValueError):  # the folder is gone or cannot be written: every process says it
        return True
    return True


def install_command(python: str) -> str:
    """The command that installs the recorder into an interpreter: from these very sources, if they are a checkout."""
    from pathlib import Path  # not for every Python of the job

    source = Path(__file__).resolve().parents[1] / "standalone"
    checkout = (source / "pyproject.toml").exists()
    return f"{shlex.quote(python)} -m pip install {shlex.quote(str(source)) if checkout else 'tracekit-collect'}"


def _start() -> BaseException | None:
    try:
        importlib.import_module("tracekit.collectors.runtime.bootstrap").arm()
    except (Exception, SystemExit) as error:
        return error
    return None


def _report(error: BaseException) -> None:
    global _reported  # noqa: PLW0603  a process has two ways in
    if _reported:
        return
    _reported = True
    python, advice = sys.executable or "python", ""
    reason = f"{python} cannot start tracekit's recorder ({type(error).__name__}: {error!s:.200})"
    if isinstance(error, ImportError):
        reason = f"{python} cannot import tracekit's recorder ({error!s:.200})"
        advice = f"; install it: {install_command(python)}"
        if (error.name or "").startswith("tracekit."):
            there = getattr(sys.modules.get("tracekit"), "__file__", None)
            advice = f"; {there} is another project's package of that name: pip uninstall tracekit, then{advice[1:]}"
    if first_to_say(reason):
        warn(f"{reason}, so training continues without being recorded{advice}")


class _AtTorch:
    """A finder that finds nothing: it starts the recorder when torch is about to be imported."""

    tried = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:  # noqa: ARG002  a finder's
        if name == "torch" and not self.tried:
            self.tried = True
            error = _start()
            if error is not None:
                _report(error)
