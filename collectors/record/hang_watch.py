"""Run the part of hang detection that is inside a rank: show progress, and report the rank's state on request.

In: PyTorch's flight recorders and this process's threads. Out, in the folder of the attempt: a *pulse*, rewritten while
operations are issued or finished, and, when the launcher asks, a dump in the format of the recorder, with the members
of all groups, the transfers that a thread waits for (gloo's recorder has none) and the stack of the main thread. A
process that ends leaves such a dump as its last words. A separate thread does this. It cannot run while C code holds
the GIL; a signal, which `faulthandler` handles without the GIL, then writes the stacks.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from .session import Session
from .small_file import create, load_plain, read_small, write_whole
from .stack_samples import OWN_FILES, stack_of
from .wire_format import (
    HANG_DUMP,
    HANG_FOLDER,
    HANG_REQUEST,
    LAST_WORDS_SUFFIX,
    PULSE,
    PULSE_SUFFIX,
    STACKS_SUFFIX,
    rank_stem,
)

#: How often the rank checks its progress and looks for requests for its state, seconds.
PERIOD_S = 0.25
#: A dump has at most this many entries, the newest.
ENTRIES = 512
#: Handled by `faulthandler`. If its handler is the default one, nothing else uses the signal.
STACK_SIGNAL = signal.SIGRTMAX - 3
#: Where a main thread is during each phase: part of a file's name, and functions (none: any). Not all of
#: torch/_dynamo/ compiles: functions that it has compiled or must leave alone are called through it.
_PHASES = (
    ("torch/distributed/checkpoint/", (), "checkpoint"),
    ("torch/serialization.py", ("save", "_save"), "checkpoint"),
    ("torch/utils/data/dataloader.py", (), "data load"),
    ("torch/_dynamo/convert_frame.py", (), "compilation"),
    ("torch/_inductor/compile_fx.py", (), "compilation"),
)
#: Marks the group on CPUs that shares its name with a group of NCCL.
_ON_CPU = " (CPU)"
_TORCH_FILES = "/torch/"


class HangWatch:
    """The watch of one rank. `start` begins; nothing here raises into training."""

    def __init__(self, session: Session, directory: Path) -> None:
        self._session, self._directory = session, directory
        # PyTorch's recorders have no public name. NCCL's is one of its own, which a build without NCCL lacks.
        torch_c: Any = importlib.import_module("torch._C._distributed_c10d")
        recorders = [name for name in ("nccl", "fr") if hasattr(torch_c, f"_dump_{name}_trace")]
        self._read: list[Callable[[], bytes]] = [getattr(torch_c, f"_dump_{name}_trace") for name in recorders]
        #: What each recorder counts, without its entries: cheap, and asks the GPU nothing.
        self._count: list[Callable[[bool], bytes]] = [
            getattr(torch_c, f"_dump_{name}_trace_json") for name in recorders
        ]
        self._main = threading.main_thread().ident
        self._pulses = 0
        self._seen: Any = None
        self._request = directory / HANG_REQUEST
        self._answered = ""
        self._signal = 0
        self._posted: dict[int, tuple[str, Any, int]] = {}
        self._in_wait: dict[int, tuple[str, Any, int, int]] = {}
        self._transfers = 0

    def start(self) -> None:
        """Hook transfers, take the signal, begin to watch."""
        session = self._session
        for name in ("send", "recv"):
            wrap = functools.partial(self._transfer, name)
            session.patch(dist.ProcessGroup, name, wrap, lacks="transfers in reports on hangs")
        session.patch(dist.Work, "wait", self._wait, lacks="transfers in reports on hangs")
        stem = rank_stem(session.rank)
        self._pulse = create(self._directory / f"{stem}{PULSE_SUFFIX}")
        if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:
            stacks = create(self._directory / f"{stem}{STACKS_SUFFIX}")
            faulthandler.register(STACK_SIGNAL, stacks, all_threads=True, chain=False)
            self._stacks = stacks  # faulthandler writes to its descriptor
            self._signal = int(STACK_SIGNAL)
        atexit.register(self._leave)
        threading.Thread(target=self._run, name="tracekit-hang", daemon=True).start()

    def _transfer(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        posted, in_wait = self._posted, self._in_wait

        @functools.wraps(original)
        def transfer(*args: Any, **kwargs: Any) -> Any:
            try:
                work = original(*args, **kwargs)
            except BaseException:  # its peer is gone: the rank has not got past it, as when a wait raises
                if len(args) > 2:
                    in_wait[threading.get_ident()] = name, args[0], args[2], time.time_ns()
                raise
            if work is not None and len(args) > 2:
                if len(posted) > 1024:  # never waited for
                    posted.clear()
                posted[id(work)] = name, args[0], args[2]
            return work

        return transfer

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        posted, in_wait = self._posted, self._in_wait

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            transfer = posted.pop(id(work), None)
            if transfer is None:
                return original(work, *args, **kwargs)
            thread = threading.get_ident()
            in_wait[thread] = *transfer, time.time_ns()
            result = original(work, *args, **kwargs)  # if it raises, the rank has not got past it
            in_wait.pop(thread, None)
            self._transfers += 1
            return result

        return wait

    def _run(self) -> None:
        while self._session.attempt_hook("hang-watch", self._look):
            time.sleep(PERIOD_S)

    def _look(self) -> bool:
        self._beat()
        self._answer()
        return True

    def _beat(self) -> None:
        """Update the pulse if anything was issued or finished since the last update."""
        seen = [count(False) for count in self._count], self._transfers, self._session.step
        if seen == self._seen and self._pulses:
            return
        self._seen = seen
        self._pulses += 1
        pulse = PULSE.pack(self._pulses, os.getpid(), self._signal, self._session.world_size)
        os.pwrite(self._pulse.fileno(), pulse, 0)

    def _answer(self) -> None:
        try:
            name = read_small(self._request).decode("ascii", "replace")
        except OSError:  # no request
            return
        if name == self._answered or not HANG_FOLDER.fullmatch(name):
            return
        self._answered = name
        folder = self._directory.parent / name
        if not folder.is_symlink():
            write_whole(folder / HANG_DUMP.format(rank=self._session.rank), json.dumps(self._dump()).encode())

    def _leave(self) -> None:
        if os.getpid() == self._session.process_id:
            self._session.attempt_hook("hang-last-words", self._say_last_words)

    def _say_last_words(self) -> None:
        """Write the state of the rank as its process ends, and the error that ends it, if any."""
        dump, error = self._dump(), getattr(sys, "last_value", None)
        if error is None:
            dump["tracekit"]["process"] = "its process ended without an error"
        else:
            dump["tracekit"]["error"] = f"{type(error).__name__}: {error!s:.200}"
            if dump["entries"] and _raised_in_torch(error.__traceback__):
                _mark_failed(dump, dump["entries"][-1])
        write_whole(self._directory / f"{rank_stem(self._session.rank)}{LAST_WORDS_SUFFIX}", json.dumps(dump).encode())

    def _dump(self) -> dict[str, Any]:
        """The state of this rank, in the format of the flight recorder."""
        dump = _joined([load_plain(read()) for read in self._read])
        world = dist.distributed_c10d._world  # noqa: SLF001  nothing public lists the groups of a process
        config = {}
        for group, ranks in world.pg_group_ranks.items():
            if (name := world.pg_names.get(group)) is not None:  # None: this rank is not a member of the group
                members = str(sorted(ranks, key=ranks.__getitem__))
                config[name] = {"name": name, "desc": group.group_desc, "ranks": members}
        for entry in dump.get("entries", []):
            name, description = entry["process_group"]
            if name not in config and (same := config.get(name.removesuffix(_ON_CPU))) is not None:
                config[name] = {**same, "name": name, "desc": description}
        dump["pg_config"] = config
        dump["entries"] = [*dump.get("entries", [])[-ENTRIES:], *self._transfers_waited_for(dump)]
        stack = stack_of(self._main or 0)
        dump["tracekit"] = {
            "rank": self._session.rank,
            "host": socket.gethostname(),
            "process_id": os.getpid(),
            "taken_ns": time.time_ns(),
            "phase": _phase(stack),
            "stack": [f"{frame.co_filename}:{line} {frame.co_name}" for frame, line in stack],
        }
        return dump

    def _transfers_waited_for(self, dump: dict[str, Any]) -> list[dict[str, Any]]:
        last = max((entry["record_id"] for entry in dump.get("entries", [])), default=0)
        entries: list[dict[str, Any]] = []
        for name, group, peer, since_ns in list(self._in_wait.values()):
            arrow = "->" if name == "send" else "<-"
            entries.append(
                {
                    "record_id": last + 1 + len(entries),
                    "pg_id": -1 - len(entries),
                    "process_group": [group.group_name, group.group_desc],
                    "collective_seq_id": 0,
                    "p2p_seq_id": 1,
                    "profiling_name": f"{group.name()}:{name} {group.rank()}{arrow}{peer}",
                    "time_created_ns": since_ns,
                    "input_sizes": [],
                    "output_sizes": [],
                    "state": "started",  # a thread is in its wait
                    "retired": False,
                    "is_p2p": True,
                }
            )
        return entries


def _joined(dumps: list[dict[str, Any]]) -> dict[str, Any]:
    """One dump of all recorders: NCCL's, then the one of what runs on CPUs.

    A group can have a backend for each. Both count for themselves, so its part on CPUs is a group of its own.
    """
    dump = dumps[0]
    for other in dumps[1:]:
        entries, statuses = dump.get("entries", []), dump.get("pg_status", {})
        if not entries and not statuses:
            dump = other
            continue
        first = 1 + max([entry["pg_id"] for entry in entries] + [int(group) for group in statuses], default=-1)
        for entry in other.get("entries", []):
            entry["pg_id"] += first
            entry["process_group"] = [f"{name}{_ON_CPU}" for name in entry["process_group"]]
        renumbered = {str(int(group) + first): status for group, status in other.get("pg_status", {}).items()}
        together = sorted([*entries, *other.get("entries", [])], key=lambda entry: entry["time_created_ns"])
        numbered = [{**entry, "record_id": number} for number, entry in enumerate(together)]
        dump = {**dump, "entries": numbered, "pg_status": {**statuses, **renumbered}}
    return dump


def _phase(stack: list[tuple[Any, int]]) -> str | None:
    for code, _ in stack:
        for part, functions, phase in _PHASES:
            if part in code.co_filename and (not functions or code.co_name in functions):
                return phase
    return None


def _mark_failed(dump: dict[str, Any], entry: dict[str, Any]) -> None:
    """Mark a failed operation as unfinished: gloo's recorder lists it as finished."""
    entry["retired"] = False
    statuses = dump.get("pg_status", {})
    if not entry["is_p2p"] and (status := statuses.get(str(entry["pg_id"]))) is not None:
        before = int(entry["collective_seq_id"]) - 1
        status["last_completed_collective"] = min(int(status["last_completed_collective"]), before)


def _raised_in_torch(traceback: TracebackType | None) -> bool:
    """True if the innermost frame, apart from our hooks, is torch's: then an operation failed."""
    innermost = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        innermost = innermost if OWN_FILES in file else file
        traceback = traceback.tb_next
    return _TORCH_FILES in innermost
