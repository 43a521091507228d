"""Forks of a process that has imported everything: each is as good as a new one, and starts a hundred times as fast."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

#: Ends a fork that waits for something that never comes.
LONGEST_S = 100


def start(work: Callable[[], object], said: Path | None = None, writing: int | None = None) -> int:
    """A fork that does `work`; returns its process. `said`: gets its stderr. `writing`: gets what `work` returns."""
    child = os.fork()
    if not child:
        _in_fork(work, said, writing)
    return child


def forked(work: Callable[[], object], said: Path | None = None) -> tuple[int, Any]:
    """The exit code of a fork, negative for a signal, and what `work` returned there; None if it did not."""
    reading, writing = os.pipe()
    child = start(work, said, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        content = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, pickle.loads(content) if content else None  # noqa: S301 - of our own fork


def sure(work: Callable[[], Any]) -> Any:
    """What `work` returns in a fork that must end well."""
    code, result = forked(work)
    assert code == 0, f"exit code {code}"
    return result


def import_all(modules: Iterable[str]) -> None:
    """Import what a fork has imported, so that the next ones need not."""
    for name in sorted(modules):
        with suppress(ImportError):  # made by another module
            import_module(name)


def _in_fork(work: Callable[[], object], said: Path | None, writing: int | None) -> NoReturn:
    code = 1
    try:
        signal.alarm(LONGEST_S)
        if said is not None:
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        result = work()
        if writing is not None:
            os.write(writing, pickle.dumps(result))
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:  # whatever it is, the test shows it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
