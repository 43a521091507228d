"""The functions that a training script can call: `span("tokenize")`, `step()`, `set_step(number)`, `log(loss=2.3)`.

In: calls of the user's code. Out: records, if `tracekit collect` started the process; otherwise these calls do nothing,
in about 100 ns. Imports only the standard library.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from .wire_format import ENV_DIRECTORY

if TYPE_CHECKING:
    from typing import ParamSpec  # Python 3.10

    P = ParamSpec("P")
R = TypeVar("R")


class _NoSink:
    """The sink outside `tracekit collect`, which does nothing; every sink has these methods."""

    __slots__ = ()

    def begin_span(self, _name: str) -> Any:
        """The start of a span of that name, to be passed to `end_span`; 0 if nothing is recorded."""
        return 0

    def end_span(self, name: str, start: Any) -> None:
        """End a span of that name now."""

    def set_step(self, step: int) -> None:
        """Start the step with this number now."""

    def begin_step(self) -> None:
        """Start the next step now."""

    def log(self, values: dict[str, Any], ended: bool) -> None:
        """Keep the values that are not None of the current step, or of the one that has ended."""


NO_SINK = _NoSink()
_sink: Any = NO_SINK


def attach(sink: Any) -> None:
    """Send spans to `sink` from now on; `NO_SINK` switches them off."""
    global _sink  # noqa: PLW0603  one process has one collector
    _sink = sink


class _Span:
    """Times a block, or every call of the function it decorates, also if it raises."""

    __slots__ = ("_name", "_start")

    def __init__(self, name: str) -> None:
        self._name = name
        self._start: Any = 0

    def __enter__(self) -> None:
        self._start = _sink.begin_span(self._name)

    def __exit__(self, *exception: object) -> None:
        if self._start:
            _sink.end_span(self._name, self._start)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        name = self._name

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with _Span(name):
                return function(*args, **kwargs)

        return timed


class _NoSpan:
    """The result of `span` outside `tracekit collect`: does nothing, and returns a function it decorates unchanged.

    `__enter__` and `__exit__` are a built-in method of the empty string, which takes any arguments and returns an empty
    string, so that exceptions propagate. Methods written in Python would double the cost.
    """

    __slots__ = ()
    __enter__ = "".format
    __exit__ = "".format

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        return function


_NO_SPAN = _NoSpan()
_under_collect = ENV_DIRECTORY in os.environ


def span(name: str) -> _Span | _NoSpan:
    """A context manager and decorator that records what runs inside as an op of that name.

    A name that is an op kind (`"data-load"`, `"checkpoint"`, ...) makes an op of that kind; any other name is kept
    as it is, and counts as `host-delay` if the span lies between a worker's computes.
    """
    return _Span(name) if _under_collect else _NO_SPAN


def step() -> _NoSpan:
    """Mark the start of a step, at the top of the loop before its data is fetched. Needed if the job has no optimizer,
    or several that do not show its steps. `with step():` does the same: a step ends where the next one starts.
    """
    _sink.begin_step()
    return _NO_SPAN


def set_step(step: int) -> None:
    """Mark the start of step number `step`, if the collector cannot infer steps (no optimizer, or several)."""
    _sink.set_step(step)


def log(*, tokens: float | None = None, loss: float | None = None, ended: bool = False) -> None:
    """Record what a step trained on and came to. Call it when the step has computed, before the next begins; once that
    has begun, with `ended`.

    `tokens`: of this data-parallel replica; its ranks may all call it, and count once. `loss`: of this rank; that of
    the job is the mean over the ranks that call it. Both are numbers, or tensors in the memory of the host: a tensor on
    a GPU is left out, since the host would have to wait for it, and so is what is no finite number, with one warning.
    The last value in a step counts.
    """
    _sink.log({"tokens": tokens, "loss": loss}, ended)


def bits_of(value: Any, *, is_count: bool) -> int:
    """The bits of a number as a float of 64. Raises if it is no finite number of the host, or no possible count."""
    if getattr(value, "is_cpu", False):  # any other tensor would make the host wait for its device
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"a {type(value).__name__}; expected a number in the memory of the host")
    number = float(value)
    if not math.isfinite(number) or (is_count and not 0 <= number <= 1 << 53):
        raise ValueError(f"{number}; expected a {'count from 0 to 2^53' if is_count else 'finite number'}")
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)
