"""Track collectives under way: when each began and ended, over which process group, and who waits for it.

In: calls of torch, from the hooks. Out: collective records, with the number of the process group. A collective ends
when its future completes; nothing here waits for that. NCCL's futures call back at once, on a stream that waits for the
collective: the device passes a mark placed there when the collective ends.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist

from .device import Instant
from .session import Session, UnderWay, now_ns
from .wire_format import NONE, Category, Flag

_BLOCKING = int(Flag.BLOCKING)
_COLLECTIVE, _WAIT = int(Category.COLLECTIVE), int(Category.WAIT)
#: `c10d::OpType::COALESCED`. NCCL's works of that type hold no future, and asking for it crashes.
_COALESCED = 17
#: All-to-alls of one tensor, and of lists of tensors.
_LISTS = "alltoall"
_EXCHANGES = frozenset({"alltoall_base", "all_to_all_single", _LISTS})
#: Remember so many different rows; routing changes with every step.
_MOST_ROWS = 4096


class SessionCollectives:
    """The collectives of one session. `waited_for`: those that end when their caller has waited, by what it waits with;
    `inside`: those that a compute started, by their works.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.waited_for: dict[int, tuple[Any, UnderWay]] = {}
        self.inside: dict[int, tuple[str, int, int]] = {}
        self._groups: dict[str, int] = {}
        self._rows: dict[tuple[tuple[int, ...], ...], int] = {}
        self._rows_told = 0
        self._without_future: set[str] = set()
        self._callbacks = Callbacks()
        session.step_listeners.append(self._forget_unfinished)
        session.before_the_end.append(self._callbacks.wait_for_all)

    def group_number(self, group: Any) -> int:
        """The number of a process group in records."""
        number = self._groups.get(group.group_name)
        if number is None:
            number = self._groups[group.group_name] = len(self._groups)
            self.session.recorder.fact(
                "group",
                {
                    "number": number,
                    "name": group.group_name,
                    "description": getattr(group, "group_desc", ""),  # from torch 2.3 on
                    "ranks": dist.get_process_group_ranks(group),
                },
            )
        return number

    def functional_group(self, module: Any, group: Any) -> int:
        """The number of the group argument of a functional collective of `module`: a name, a group, ranks or a mesh."""
        name = module._resolve_group_name(group)  # noqa: SLF001
        return self.group_number(dist.distributed_c10d._resolve_process_group(name))  # noqa: SLF001

    def launched(self, args: tuple[Any, ...]) -> Instant | None:
        """The current time on the clock of the first tensor; None while a graph is captured.

        The callback of a captured collective would pull its stream into the graph, and the capture would fail.
        """
        session = self.session
        if session.device is None:
            return session.instant()
        return None if session.device.capturing() else session.instant_for(_first_tensor(args))

    def begins(self, args: tuple[Any, ...]) -> Instant | None:
        """As `launched`, for a call from Python, which may be the first op of a step."""
        session = self.session
        if session.device is None and not session.step_over and session.held is None:
            return now_ns()
        first = session.busy == 0 and get_ident() == session.thread_id
        if session.device is None:
            return session.begin_host_op() if first else now_ns()
        if session.device.capturing():
            return None
        if first:
            return session.begin_op() if session.device.owns(_first_tensor(args)) else session.begin_host_op()
        return self.launched(args)

    def rows_number(self, name: str, group: Any, args: tuple[Any, ...]) -> int:
        """The number of the rows that an all-to-all moves to and from each rank; NONE for other collectives."""
        if name not in _EXCHANGES or self.session.recorder.bounded:  # facts are kept for good
            return NONE
        if name == _LISTS:  # outputs, inputs
            rows = tuple(tuple(tensor.shape[0] if tensor.dim() else 1 for tensor in tensors) for tensors in args[:2])
        else:  # output, input, rows received, rows sent; none of a tensor that has equal parts
            size = group.size()
            rows = tuple(tuple(split) or (side.shape[0] // size,) * size for side, split in zip(args[:2], args[2:4]))
        number = self._rows.get(rows)
        if number is None:
            if len(self._rows) >= _MOST_ROWS:
                self._rows.clear()
            number = self._rows[rows] = self._rows_told
            self._rows_told += 1
            self.session.recorder.fact("rows", {"number": number, "sent": rows[1], "received": rows[0]})
        return number

    def started(
        self,
        name: str,
        group: Any,
        args: tuple[Any, ...],
        start: Instant,
        work: Any,
        *,
        flags: int = 0,
        queued_us: int = NONE,
    ) -> tuple[int, int]:
        """Record the collective once its caller has waited or its future completes; at once if it has neither.

        `flags`, `queued_us`: of a bucket, see `Session.queued_us`. Returns the numbers of its process group and rows.
        """
        session = self.session
        number = self._groups.get(group.group_name)
        if number is None:
            number = self.group_number(group)
        # The caller of `torch.distributed` waits itself if the options, the last argument, say so.
        blocks = args and not getattr(args[-1], "asyncOp", True) and get_ident() == session.thread_id
        first = args[0] if args else None
        if type(first) is list and len(first) == 1:  # nearly always
            first = first[0]
        size = first.nbytes if isinstance(first, torch.Tensor) else self.bytes_of(first)
        rows = self.rows_number(name, group, args) if queued_us == NONE else queued_us
        op = session.under_way(_COLLECTIVE, name, start, number, size, flags | (_BLOCKING if blocks else 0), rows)
        if work is None:  # it runs on the current stream
            session.ended(op)
            return number, rows
        # A blocking caller continues as soon as the collective ends; the thread that completes futures may run late.
        waited_for = blocks and type(start) is int
        if waited_for or name in self._without_future or (session.device is not None and _is_coalesced(work)):
            self.waited_for[id(work)] = (work, op)
            return number, rows
        try:
            future = work.get_future()
        except RuntimeError:  # gloo has none for some collectives: they end when their caller continues
            self._without_future.add(name)
            self.waited_for[id(work)] = (work, op)
            return number, rows
        if type(start) is int:
            self._callbacks.hold(number, work)
        self._callbacks.add(future, session.attempt_hook, name, session.ended, op)
        return number, rows

    def bytes_of(self, argument: Any) -> int:
        """Size of the tensors in an argument of a collective, bytes."""
        if isinstance(argument, torch.Tensor):
            size: int = argument.nbytes
            return size
        return sum(map(self.bytes_of, argument)) if isinstance(argument, (list, tuple)) else 0

    def waited(self, name: str, group: int, rows: int, start: Instant) -> None:
        """Record that a compute has waited since `start` for a collective it started inside."""
        self.session.ended(self.session.under_way(_WAIT, name, start, group, 0, 0, rows))

    def _forget_unfinished(self) -> None:
        self.session.unfinished += len(self.waited_for)
        self.waited_for.clear()
        self.inside.clear()


def _is_coalesced(work: Any) -> bool:
    op_type = getattr(work, "_get_op_type", None)
    return op_type is not None and op_type() == _COALESCED


def _first_tensor(args: Any) -> torch.Tensor | None:
    """The first tensor among arguments, looking into lists."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            tensor = _first_tensor(value)
            if tensor is not None:
                return tensor
    return None


#: Threads of a gloo process group: this many works can end at once.
GLOO_THREADS = 2
#: How long to wait for callbacks at the end, and how often to check, seconds. Callbacks of finished collectives take a
#: moment; those of unfinished ones never run.
TIMEOUT_S, POLL_S = 2.0, 0.0005


class Callbacks:
    """The callbacks of one rank, on gloo's threads.

    A process group joins its threads when it ends, and its last owner may hold the GIL meanwhile: a thread that then
    needs it, for a callback or to release a work, never returns. When the interpreter shuts down, such a thread is
    killed, and the process with it. Neither may happen to a recorded job.
    """

    def __init__(self) -> None:
        self._alive: dict[int, None] = {}
        # Keeps gloo's threads from being the last owners of their latest works.
        self._latest: defaultdict[int, deque[Any]] = defaultdict(functools.partial(deque, maxlen=GLOO_THREADS))

    def add(self, future: Any, tell: Callable[..., Any], *args: Any) -> None:
        """Call `tell(*args)` when `future` completes."""
        future.add_done_callback(_Callback(self._alive, tell, args))

    def hold(self, group: int, work: Any) -> None:
        """Keep a gloo work alive until its process group has started some more."""
        self._latest[group].append(work)

    def wait_for_all(self) -> None:
        """Let gloo's threads finish the callbacks while they can still acquire the GIL."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._alive and time.monotonic() < deadline:
            time.sleep(POLL_S)


class _Callback:
    """Listed in `alive` until the thread that called it has released it."""

    __slots__ = ("_alive", "_args", "_tell")

    def __init__(self, alive: dict[int, None], tell: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._alive, self._tell, self._args = alive, tell, args
        alive[id(self)] = None

    def __call__(self, _future: Any) -> None:
        self._tell(*self._args)

    def __del__(self) -> None:
        self._alive.pop(id(self), None)
