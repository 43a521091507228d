"""Reads logs of RL post-training: who wrote them, what each step takes, and what its phases take.

The generic format has a line of JSON for each trajectory and for each phase: `{"trajectory", "step", "engine",
"submit", "start", "end", "tokens", "tool_s", "version", "status"}` and `{"phase", "role", "step", "start", "end"}`,
seconds of one clock. Nothing in a file is executed: pickles are refused unread.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, permutations
from pathlib import Path
from statistics import median_low
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tracekit.base.errors import FormatError
from tracekit.base.paths import Look, unreadable
from tracekit.base.text import listed, quoted, short
from tracekit.collectors.importers.rl_frameworks import (
    CHECKPOINT,
    FRAMEWORKS,
    TOKENS,
    TOLERANCE,
    VALIDATION,
    Framework,
    Record,
    formats_of,
    plain,
    unnumbered,
)
from tracekit.collectors.importers.sniff import other_log
from tracekit.trace.model import Format
from tracekit.trace.post_training import (
    ROLLOUT_IDLE,
    TOOL_CALLS,
    TOOLS,
    TRAINER_IDLE,
    TRAINER_WAIT,
    PhaseLog,
    Phases,
    RlTimeline,
    StepTime,
    Trajectories,
)

#: Largest file that is read, bytes.
_LARGEST_FILE = 4 << 30
#: What is read of a file to recognise it, bytes: consoles print much before the first step.
_LOOKED_AT = 1 << 20
#: A pickle of protocol 2 or later, and the archive in which torch saves one.
_PICKLES = (*(bytes((0x80, protocol)) for protocol in range(2, 6)), b"PK\x03\x04")
#: Beginnings of the lines of the generic format.
_GENERIC = (b'"trajectory"', b'"phase"')


def read_rl(paths: Sequence[Path], written_by: Format | None = None) -> PhaseLog | RlTimeline:
    """Read the files of one run, in their order, of folders all `*.jsonl`; `written_by`: None to find out.

    Raises FormatError.
    """
    contents = {str(file): _content(file) for path in paths for file in _files(path)}
    formats = {written_by} if written_by else set[Format]().union(*(_formats(*item) for item in contents.items()))
    if len(formats) > 1:
        raise FormatError(f"{listed(contents)}: logs of {listed(sorted(formats))}; give the files of one run")
    (format_,) = formats
    if format_ is Format.TRAJECTORIES:
        return read_trajectories(contents)
    framework = next(framework for framework in FRAMEWORKS if framework.format is format_)
    records = {name: _records(framework, name, content) for name, content in contents.items()}
    steps = {name: {step for step, _, _ in of_file} for name, of_file in records.items()}
    for earlier, later in permutations(steps, 2):  # a run that goes on in a new file repeats a few
        if steps[earlier] <= steps[later]:
            raise FormatError(f"{earlier} and {later} have the same steps: two runs; give the files of one")
    return read_phases(framework, chain.from_iterable(records.values()), listed(contents))


def _records(framework: Framework, name: str, content: bytes) -> list[Record]:
    try:
        records = list(framework.records(_lines(content)))
    except ValueError as error:
        raise FormatError(f"{name}, {error}") from None
    if records or framework.keys is None:
        return records
    return [(step, values, None) for step, values in enumerate(unnumbered(_lines(content), framework.keys))]


def looks_like_rl(look: Look) -> bool:
    """Whether a path is a log of post-training by its beginning, or the folder into which tracekit.rl records."""
    if look.is_folder:
        return any(map(looks_like_rl, islice(look.files((".jsonl",)), 1)))
    return bool(_formats_at(look))


def is_record_of_rl(look: Look) -> bool:
    """Whether a file is in the generic format: all such files of a folder are one run."""
    return look.path.suffix == ".jsonl" and _formats_at(look) == {Format.TRAJECTORIES}


def _formats_at(look: Look) -> set[Format]:
    if not look.head:
        return set()
    try:
        return _formats(str(look.path), look.beginning(_LOOKED_AT))
    except FormatError:
        return set()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if path.exists() and not path.is_file():
            raise FormatError(f"{path}: a pipe or a device, not a file; save what it gives to a file first")
        return [path]
    if files := sorted(path.glob("*.jsonl")):
        return files
    raise FormatError(
        f"{path}: a folder without *.jsonl; give the log, or the folder that tracekit.rl has recorded into"
    )


def _content(path: Path) -> bytes:
    """What a file holds. Raises FormatError for one that is not text."""
    try:
        with path.open("rb") as file:
            beginning = file.read(4096)
            if beginning.startswith(_PICKLES):
                raise FormatError(f"{path}: a pickle, which could run any code if it were read; give the log as text")
            if beginning.startswith(b"\x1f\x8b"):
                raise FormatError(f"{path}: compressed; unpack it first (gunzip -k)")
            if b"\0" in beginning:
                raise FormatError(f"{path}: not text; give the log that the framework printed")
            if path.stat().st_size > _LARGEST_FILE:
                raise FormatError(f"{path}: larger than {_LARGEST_FILE >> 30} GiB; give fewer steps")
            content = beginning + file.read()
    except OSError as error:
        raise unreadable(path, error) from None
    content = _whole_lines(content.removeprefix(codecs.BOM_UTF8))
    if not content or content.isspace():
        raise FormatError(f"{path}: an empty file; give the log of a run that has trained for a few steps")
    return content


def _whole_lines(content: bytes) -> bytes:
    """Without a last line of JSON that is still being written, or whose writer was killed."""
    end = content.rfind(b"\n") + 1
    if content[end : end + 1] == b"{":
        try:
            json.loads(content[end:])
        except (ValueError, RecursionError):
            return content[:end]
    return content


def _formats(path: str, content: bytes) -> set[Format]:
    """The formats of a file's lines. Raises FormatError if there are none."""
    first = content.lstrip()[:65536].split(b"\n", 1)[0]
    if first.startswith(b"{") and any(key in first for key in _GENERIC):
        return {Format.TRAJECTORIES}
    formats = formats_of(content, _lines(content))
    if not formats:
        if (log := other_log(content[:_LOOKED_AT], path)) is not None:
            raise FormatError(f"{path}: {log}")
        raise FormatError(
            f"{path}, line 1: {first[:60].decode(errors='replace')!r}; no line is as {listed(Format)} write it. Give"
            " the output of the trainer with its timings, or docs/rl.md's generic format"
        )
    return formats


def _lines(content: bytes) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without what a console puts around them; progress bars end theirs with a return."""
    for number, line in enumerate(content.splitlines(), 1):
        yield number, plain(line.decode(errors="replace").rstrip())


_Floats = npt.NDArray[np.float64]
#: A time beyond it is none.
LONGEST_S = 1e12
#: How exact the clock of a console is: it shows whole seconds.
_CLOCK_S = 2.0
#: Units of time differ by more than this factor. What differs by less may have been printed late.
_UNITS = 10
#: A gap of more steps is a part of the run that was not given, not lost lines.
_MOST_LOST = 10_000
#: Phases that lie in the step of some versions, and behind that of others.
_MOVED = (VALIDATION, CHECKPOINT)
#: A phase explains time if it exceeds that by this share at most, and leaves less than that of it.
_EXPLAINED, _UNEXPLAINED = 0.05, 0.2
#: Values of both sides of a job that generates while it trains -> our names.
_IDLE = {"trainer/idle_ratio": TRAINER_IDLE, "rollouter/idle_ratio": ROLLOUT_IDLE}
#: What verl times within a generation: of the slowest trajectory, and of all.
_SLOWEST, _LONGEST = "timing_s/agent_loop/slowest/{}", "timing_s/agent_loop/{}/max"
_TOOL_CALLS, _SAMPLING = "tool_calls", "generate_sequences"


def read_phases(framework: Framework, records: Iterable[Record], where: str) -> PhaseLog:
    """All steps of a log; from a step on that is logged again, as after a restart, the last attempt alone.

    Raises FormatError.
    """
    steps: dict[int, dict[str, float]] = {}
    values_of: dict[int, dict[str, float]] = {}
    restarts: list[int] = []
    rates: dict[int, list[float | None]] = {}
    for number, values, written_s in records:
        if not 0 <= number < 1 << 31:
            raise FormatError(f"{where}: step {number}; expected a number of at least 0 and below {1 << 31}")
        rates[number] = [values.get(name) for name in TOKENS] + [written_s]
        timers = {match[1]: value for key, value in values.items() if (match := framework.timer.fullmatch(key))}
        for name, value in timers.items():
            if not 0 <= value <= LONGEST_S:
                expected = f"a time of at least 0 and at most {LONGEST_S:g} s"
                took = "is no number" if math.isnan(value) else f"took {value} s"
                raise FormatError(f"{where}: step {number}: {name} {took}; expected {expected}")
        before = steps.get(number, {})
        # slime reports a step in two records: those that have a timer in common are of two attempts.
        if before.keys() & timers.keys() and not timers.items() <= before.items():
            restarts.append(number)
            steps = {step: timers_of for step, timers_of in steps.items() if step < number}
            before = {}
        if timers:
            steps[number] = before | timers
            values_of[number] = (values_of.get(number, {}) if before else {}) | values
    # A log that was cut can lack one of the two: then the generation is unknown, not 0.
    generates = {name for name, phase in framework.phases.items() if phase == "generate"}
    needed = generates if any(generates & timers.keys() for timers in steps.values()) else set()
    numbers = sorted(
        number for number, timers in steps.items() if timers.get(framework.step, 0.0) > 0 and needed <= timers.keys()
    )
    if not numbers:
        raise FormatError(f"{where}: {framework.format} logs no whole step here; expected lines with {framework.step}")
    whole, logged = [steps[number] for number in numbers], [values_of[number] for number in numbers]
    stale = any(map(framework.stale, logged))
    step_s = np.array([timers[framework.step] for timers in whole])
    phases = _phases(framework, whole, stale=stale)
    means = {name: math.fsum(timers.get(name, 0.0) for timers in whole) / len(whole) for name in set().union(*whole)}
    step_time = framework.step_time(means, {phase: float(column.mean()) for phase, column in phases.items()})
    if step_time is StepTime.SERIAL:
        phases = _within(phases | _waits(framework, whole), step_s)
    else:
        phases = {phase: took for phase, took in phases.items() if phase not in _MOVED}
    return PhaseLog(
        framework.format,
        step_time,
        np.array(numbers, dtype=np.int64),
        step_s,
        phases,
        tuple(sorted(steps.keys() - set(numbers) | _lost(sorted(steps)))),
        _contradiction(step_s, [rates[number] for number in numbers]),
        tuple(restarts),
        stale or (TRAINER_WAIT in phases and not framework.around),
        _measures(logged),
    )


def _lost(numbers: Sequence[int]) -> set[int]:
    """The steps between these, ascending and at the usual distance, whose records are missing."""
    apart = median_low(np.diff(numbers).tolist() or [1])
    gaps = [range(before + apart, after - apart + 1, apart) for before, after in pairwise(numbers)]
    return set(chain.from_iterable(gap for gap in gaps if len(gap) <= _MOST_LOST))


def _phases(framework: Framework, whole: list[dict[str, float]], *, stale: bool) -> dict[str, _Floats]:
    """The seconds of each phase, [steps]. `stale`: the job generates while it trains, which only waits for samples."""
    seconds: dict[str, _Floats] = {}
    outside = {framework.step, *framework.not_phases, *framework.around}
    for place, timers in enumerate(whole):
        for name, value in timers.items():
            if name not in outside:
                phase = framework.phase(name)
                phase = TRAINER_WAIT if stale and phase == "generate" else phase
                seconds.setdefault(phase, np.zeros(len(whole)))[place] += value
    return seconds


def _waits(framework: Framework, whole: list[dict[str, float]]) -> dict[str, _Floats]:
    """What timers take beyond those inside them: the trainer waits."""
    waits = [
        math.fsum(
            max(timers[name] - math.fsum(timers.get(inner, 0.0) for inner in inside), 0.0)
            for name, inside in framework.around.items()
            if name in timers
        )
        for timers in whole
    ]
    return {TRAINER_WAIT: np.array(waits)} if any(waits) else {}


def _within(phases: dict[str, _Floats], step_s: _Floats) -> dict[str, _Floats]:
    """The phases without the validations and checkpoints that lie outside the step.

    Inside, steps that have one take longer by it than the phases of the others explain. Where all steps have one, the
    phases with it add up to the step, and without do not.
    """
    moved = {name: phases[name] for name in _MOVED if name in phases}
    always = {name: took for name, took in phases.items() if name not in moved}
    rest = step_s - sum(always.values(), np.zeros_like(step_s))
    for name, took in moved.items():
        others = sum((moved_s for other, moved_s in moved.items() if other != name), np.zeros_like(step_s))
        has, alone = took > 0, others == 0
        if has.all() or not has.any():
            inside = any(_explains(rest, explained) for explained in (took, took + others))
        else:
            longer = np.median(rest[has & alone] if (has & alone).any() else rest[has]) - np.median(rest[~has])
            inside = bool(longer > np.median(took[has]) / 2)
        if inside:
            always[name] = took
    return always


def _explains(rest: _Floats, took: _Floats) -> bool:
    """Whether a phase is most of the time that the others do not explain, and no more than that."""
    rest_s, took_s = float(rest.mean()), float(took.mean())
    return 0 < took_s <= rest_s + max(_EXPLAINED * rest_s, 0.0) and rest_s - took_s <= _UNEXPLAINED * rest_s


def _measures(logged: list[dict[str, float]]) -> dict[str, _Floats]:
    """What a log says of each step apart from its phases, [steps], nan where it does not."""
    measured = {name: [_ratio(values, end) for values in logged] for end, name in _IDLE.items()}
    measured[TOOLS] = [_tools_s(values) for values in logged]
    measured[TOOL_CALLS] = [values.get(f"timing_s/agent_loop/{_TOOL_CALLS}/mean", math.nan) for values in logged]
    return {name: np.array(column) for name, column in measured.items() if not np.isnan(column).all()}


def _ratio(values: Mapping[str, float], end: str) -> float:
    """The share whose key ends so: some versions put `fully_async/` in front."""
    return next((value for key, value in values.items() if key.endswith(end) and 0 <= value <= 1), math.nan)


def _tools_s(values: Mapping[str, float]) -> float:
    """At most so much of a step is due to tools: the generation beyond the longest sampling, if the trajectory that
    took longest spent longer in tools than it was sampled; nan if the step has no tools.
    """
    slowest, longest = (
        [values.get(form.format(name), math.nan) for name in (_TOOL_CALLS, _SAMPLING)] for form in (_SLOWEST, _LONGEST)
    )
    tools_s, sampling_s = longest if math.isnan(slowest[0]) else slowest
    longest_s = sampling_s if math.isnan(longest[1]) else longest[1]
    generation_s = values.get("timing_s/gen", math.nan)
    if math.isnan(tools_s + sampling_s + generation_s) or max(tools_s, longest[0]) <= 0:
        return math.nan
    return max(generation_s - longest_s, 0.0) if tools_s > sampling_s else 0.0


def _contradiction(step_s: np.ndarray, others: list[list[float | None]]) -> str | None:
    """Why the steps cannot have taken so many seconds: by the time at which they were printed, or by verl's rate of
    tokens, which is that of each GPU. `others`: rate, tokens, and that time, of each step.
    """
    rate, tokens, written_s = (np.array(column, dtype=np.float64) for column in zip(*others, strict=True))
    order = np.argsort(written_s)
    passed_s, logged_s = written_s[order[-1]] - written_s[order[0]], step_s[order[1:]].sum()
    if logged_s > _UNITS * (passed_s + _CLOCK_S):
        why = f"{len(step_s) - 1} steps take {logged_s:,.0f} s, but were printed within {passed_s:,.0f} s"
    elif (tokens < rate * step_s * (1 - TOLERANCE)).all():
        why = f"{rate.mean():,.0f} tokens a second of each GPU are more than all {tokens.mean():,.0f} of a step"
    else:
        return None
    return f"{why}: the timers do not count seconds"


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
    repeated = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in (names, step, engine, end)])
    order = np.delete(order, 1 + np.flatnonzero(repeated))
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
