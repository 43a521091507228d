"""What is around each call of a rank's host: step, annotation, operator, phase, and since when its thread was busy.

In: the tables of a rank's events, in order of start. Out: arrays, an entry for each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tracekit.collectors.importers.kineto.event_columns import outermost
from tracekit.collectors.importers.kineto.event_tables import Table, rows_of
from tracekit.collectors.importers.kineto.host_names import (
    NCCL_ANNOTATION,
    PASS_OF_MODULE,
    PIPELINE_ACTION,
    RECOMPUTES,
    STEP,
    codes_of_phases,
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def marked_steps(annotations: Table, names: Sequence[str]) -> Table:
    """Return the marked steps, by start."""
    matches = map(STEP.match, [*names, ""])
    numbers = np.array([int(match[1]) if match else -1 for match in matches], np.int64)
    step = numbers[annotations["name"]]
    marked = np.flatnonzero((step >= 0) & (annotations["dur"] > 0))
    return {"start": annotations["ts"][marked], "duration": annotations["dur"][marked], "step": step[marked]}


def step_at(steps: Table, times: Floats) -> Ints:
    """Return the step that contains each time, -1 for none."""
    begin = steps["start"]
    row = np.searchsorted(begin, times, side="right") - 1
    ends = np.append(begin + steps["duration"], -np.inf)
    step = np.where((row >= 0) & (times <= ends[row]), np.append(steps["step"], -1)[row], -1)
    return step.astype(np.int32)


def pass_at(annotations: Table, names: Sequence[str], times: Floats) -> Ints:
    """Return the name of the shortest annotation such as "attn(F)" around each time, on any thread; -1 for none."""
    annotation = np.full(len(times), -1)
    codes = [code for code, name in enumerate(names) if PASS_OF_MODULE.fullmatch(name)]
    rows = np.flatnonzero(np.isin(annotations["name"], codes))
    begin, end = annotations["ts"][rows], annotations["ts"][rows] + annotations["dur"][rows]
    first, last = np.searchsorted(times, begin), np.searchsorted(times, end, side="right")
    for shorter in np.argsort(-annotations["dur"][rows], kind="stable").tolist():
        annotation[first[shorter] : last[shorter]] = annotations["name"][rows[shorter]]
    return annotation


class CallThreads:
    """The activity of a rank's host threads around each call."""

    def __init__(self, calls: Table, operators: Table, annotations: Table, names: Sequence[str]) -> None:
        self._calls, self._names = calls, names
        self._operators, self._annotations = operators, annotations
        self._operator_around = self.containing(operators)

    def containing(self, spans: Table, inner: Table | None = None) -> Ints:
        """Return the row of the outermost of `spans` around the start of each call, or of each `inner` span, on its
        thread; -1 for none.
        """
        thread, started = ((self._calls if inner is None else inner)[name] for name in ("thread", "ts"))
        container = np.full(len(thread), -1, np.int64)
        begin, end = spans["ts"], spans["ts"] + spans["dur"]
        for thread_number in np.unique(thread):
            started_here, spans_here = (
                np.flatnonzero(thread == thread_number),
                np.flatnonzero(spans["thread"] == thread_number),
            )
            if not len(spans_here):
                continue
            rows = spans_here[outermost(begin[spans_here], spans["dur"][spans_here])]
            place = np.searchsorted(begin[rows], started[started_here], side="right") - 1
            holds = (place >= 0) & (started[started_here] <= end[rows[place]])
            container[started_here] = np.where(holds, rows[place], -1)
        return container

    def recomputed(self, python: Table) -> Bools:
        """Return which calls are inside the recomputation of an activation checkpoint.

        The reentrant kind then runs a backward of its own, which is not repeated.
        """
        codes = ([code for code, name in enumerate(self._names) if pattern.search(name)] for pattern in RECOMPUTES)
        again, gradients = (rows_of(python, np.flatnonzero(np.isin(python["name"], some))) for some in codes)
        gradients = rows_of(gradients, np.flatnonzero(self.containing(again, gradients) >= 0))
        return np.asarray((self.containing(again) >= 0) & (self.containing(gradients) < 0))

    def busy_since(self) -> Floats:
        """Return the start of the operator around each call; outside any operator, the call's own start."""
        begun = np.append(self._operators["ts"], np.inf)[self._operator_around]
        return np.asarray(np.minimum(begun, self._calls["ts"]))

    def operators(self) -> npt.NDArray[np.int32]:
        """Return the name of the outermost operator around each call."""
        return np.append(self._operators["name"], np.int32(-1))[self._operator_around].astype(np.int32)

    def phases(self) -> npt.NDArray[np.int8]:
        """Return the phase of a step that each call belongs to."""
        phase_of_call = np.zeros(len(self._calls["ts"]), np.int8)
        for phase, codes in reversed(list(enumerate(codes_of_phases(self._names), start=1))):
            for spans in (self._operators, self._annotations):
                of_phase = rows_of(spans, np.flatnonzero(np.isin(spans["name"], codes)))
                phase_of_call[self.containing(of_phase) >= 0] = phase
        return phase_of_call

    def actions(self) -> npt.NDArray[np.int32]:
        """Return the name of the schedule's action during which each call begins, on any thread; -1 for none.

        One thread runs the schedule; autograd launches the kernels of backwards from others meanwhile.
        """
        codes = [code for code, name in enumerate(self._names) if PIPELINE_ACTION.match(name)]
        spans = rows_of(self._annotations, np.flatnonzero(np.isin(self._annotations["name"], codes)))
        row = np.searchsorted(spans["ts"], self._calls["ts"], side="right") - 1
        ends = np.append(spans["ts"] + spans["dur"], -np.inf)
        inside = (row >= 0) & (self._calls["ts"] <= ends[row])
        return np.where(inside, np.append(spans["name"], np.int32(-1))[row], -1).astype(np.int32)

    def collective_names(self) -> list[tuple[str, Bools]]:
        """Return the collectives named by annotations such as nccl:all_reduce, each with a mask of the calls inside."""
        named = {code: match[1] for code, name in enumerate(self._names) if (match := NCCL_ANNOTATION.match(name))}
        spans = rows_of(self._annotations, np.flatnonzero(np.isin(self._annotations["name"], list(named))))
        around = np.append(spans["name"], -1)[self.containing(spans)]
        return [(name, around == code) for code, name in named.items() if (around == code).any()]
