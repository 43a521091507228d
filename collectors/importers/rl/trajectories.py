"""The generic format: a line of JSON for each trajectory and for each phase.

In: `{"trajectory", "step", "engine", "submit", "start", "end", "tokens", "tool_s", "version", "status"}` and
`{"phase", "role", "step", "start", "end"}`, seconds of one clock. Out: a `RlTimeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Struct

from tracekit.base.errors import FormatError
from tracekit.base.text import listed, quoted, short
from tracekit.collectors.importers.rl.frameworks import TOLERANCE
from tracekit.trace.post_training import Phases, RlTimeline, Trajectories

_Step = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
#: No clock shows more seconds: since 1970, those are of the year 5138.
_Clock = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
_EXPECTED = (
    'expected {"trajectory": ..., "step": 0, "engine": ..., "start": 0.0, ...} or {"phase": "train", ...}, in seconds'
)


class _TrajectoryLine(Struct, gc=False):
    """A trajectory, or a phase if it has that key."""

    step: _Step
    start: _Clock
    end: _Clock
    phase: str | None = None
    trajectory: str | int | None = None
    engine: str | int = 0
    submit: _Clock | None = None
    tokens: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0
    tool_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    version: _Step | None = None


_decoder = msgspec.json.Decoder(_TrajectoryLine)


def read_trajectories(contents: Mapping[str, bytes]) -> RlTimeline:
    """Read the files of a run, by their names. Raises FormatError, with file and line, for a line that is not as the
    module describes.
    """
    lines = [line for where, content in contents.items() for line in _read(content, where)]
    phases = [line for line in lines if line.phase is not None]
    trajectories = [line for line in lines if line.phase is None]
    return RlTimeline(
        Phases(np.array([line.phase or "" for line in phases], dtype=str), *_times(phases)),
        _trajectories(trajectories, listed(contents)) if trajectories else None,
    )


def _read(content: bytes, where: str) -> list[_TrajectoryLine]:
    lines = []
    for number, text in enumerate(content.split(b"\n"), 1):
        if text.strip():
            try:
                lines.append(_decoder.decode(text))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise FormatError(f"{where}, line {number}: {error}; {_EXPECTED}") from None
    for line in lines:
        if (wrong := _wrong(line)) is not None:
            raise FormatError(f"{where}: {wrong}")
    return lines


def _wrong(line: _TrajectoryLine) -> str | None:
    """What contradicts itself in a line, None if nothing does."""
    if line.phase is None and line.trajectory is None:
        return f"a line of step {line.step} has neither a trajectory nor a phase; {_EXPECTED}"
    took = line.end - line.start
    if took >= 0 and line.tool_s <= took * (1 + TOLERANCE):
        return None
    name = f"phase {short(line.phase)!r}" if line.phase else f"trajectory {quoted(line.trajectory)}"
    if took < 0:
        times = f"ends at {line.end} s, before it starts at {line.start} s; all times must be of one clock"
    else:
        times = f"takes {took} s, of which {line.tool_s} s in tools; count tools that run at the same time once"
    return f"{name} of step {line.step} {times}"


def _times(lines: Sequence[_TrajectoryLine]) -> tuple[Any, Any, Any]:
    return (
        np.array([line.step for line in lines], dtype=np.int64),
        np.array([line.start for line in lines], dtype=np.float64),
        np.array([line.end for line in lines], dtype=np.float64),
    )


def _trajectories(lines: list[_TrajectoryLine], where: str) -> Trajectories:
    if not any(line.tokens for line in lines):
        raise FormatError(f"{where}: no trajectory has tokens; give the number that each decoded")
    step, start, end = _times(lines)
    submit = np.array([line.start if line.submit is None else line.submit for line in lines])
    engines, engine = np.unique([str(line.engine) for line in lines], return_inverse=True)
    # Lines are often in order of completion. Names of one length, such as 3-07 and 3-12, sort as numbers do.
    names = np.array([str(line.trajectory) for line in lines])
    order = np.lexsort((names, np.char.str_len(names), submit, step))
    # A line that is there twice, as in a copy of a file, is one request.
    again = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in (names, step, engine, end)])
    order = np.delete(order, 1 + np.flatnonzero(again))
    ended: dict[tuple[int, str | int | None], float] = {}
    for line in map(lines.__getitem__, order.tolist()):
        request = line.step, line.trajectory
        if line.start < ended.get(request, line.start) - TOLERANCE * (line.end - line.start):
            raise FormatError(
                f"{where}: trajectory {quoted(line.trajectory)} of step {line.step} starts at {line.start} s, while one"
                f" of that name runs until {ended[request]} s; names are unique in a step: give the records of one"
                " attempt of one run"
            )
        ended[request] = line.end
    columns: Iterator[Any] = (
        column[order]
        for column in (
            step,
            engine.astype(np.int64),
            submit,
            start,
            end,
            np.array([line.tokens for line in lines], dtype=np.float64),
            np.array([line.tool_s for line in lines], dtype=np.float64),
            np.array([-1 if line.version is None else line.version for line in lines], dtype=np.int64),
        )
    )
    return Trajectories(tuple(map(str, engines)), *columns)
