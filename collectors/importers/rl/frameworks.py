"""What frameworks print about the phases of a step, as facts: which timers there are, and which contain which.

In: lines of a log. Out: a `PhaseLog`. Checked in the sources: verl's `ray_trainer.py`, OpenRLHF's `ppo_trainer.py` and
`ppo_trainer_async.py`, slime's `actor.py` and `train_metric_utils.py`, NeMo-RL's `grpo.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain

import numpy as np
from msgspec import Struct

from tracekit.base.errors import FormatError
from tracekit.base.text import quoted
from tracekit.trace.rl import Format, PhaseLog, StepTime

#: A step's number, seconds by the timer's name as the framework prints it, and when it printed them; None if unknown.
Record = tuple[int, dict[str, float], float | None]
#: Colours, and what Ray puts before a line of a worker.
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^\s*\((?:[\w.:]+ )?pid=[^)]*\)\s*")
_NUMBER = r"(?:[\w.]+\()?([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"
#: A time beyond it is none.
LONGEST_S = 1e12
#: Two clocks, or a sum and its parts, differ by this share of a step at most.
TOLERANCE = 0.01
#: The clock of a console, and how exact a difference is: it shows whole seconds.
_CLOCK = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_CLOCK_S = 2.0
#: Units of time differ by more than this factor. What differs by less may have been printed late.
_UNITS = 10


class Framework(Struct, frozen=True):
    """How a framework reports times.

    `timer`: matches keys of timers, and its group is the timer's name. `step`: the timer of the whole step. `phases`:
    our names of its timers; one that is not here keeps its own. `not_phases`: timers around other timers, inside them,
    or outside the step. `records`: reads lines, each with its number in the file, and raises ValueError.
    """

    format: Format
    timer: re.Pattern[str]
    step: str
    phases: Mapping[str, str]
    not_phases: frozenset[str]
    records: Callable[[Iterator[tuple[int, str]]], Iterator[Record]]
    step_time: Callable[[Mapping[str, float], Mapping[str, float]], StepTime]


def plain(line: str) -> str:
    """A line of a console without colours and without Ray's prefix."""
    return _DECORATION.sub("", _DECORATION.sub("", line)) if "\x1b" in line or "pid=" in line else line


def read_phases(framework: Framework, records: Iterable[Record], where: str) -> PhaseLog:
    """All steps of a log; from a step on that is logged again, as after a restart, the last attempt alone.

    Raises FormatError.
    """
    steps: dict[int, dict[str, float]] = {}
    restarts: list[int] = []
    rates: dict[int, list[float | None]] = {}
    for number, values, written_s in records:
        if not 0 <= number < 1 << 31:
            raise FormatError(f"{where}: step {number}; expected a number of at least 0 and below {1 << 31}")
        rates[number] = [values.get(name) for name in _TOKENS] + [written_s]
        found = {match[1]: value for key, value in values.items() if (match := framework.timer.fullmatch(key))}
        for name, value in found.items():
            if not 0 <= value <= LONGEST_S:
                expected = f"a time of at least 0 and at most {LONGEST_S:g} s"
                took = "is no number" if math.isnan(value) else f"took {value} s"
                raise FormatError(f"{where}: step {number}: {name} {took}; expected {expected}")
        known = steps.get(number, {})
        # slime reports a step in two records: those that have a timer in common are of two attempts.
        if known.keys() & found.keys() and not found.items() <= known.items():
            restarts.append(number)
            steps = {step: timers for step, timers in steps.items() if step < number}
            known = {}
        if found:
            steps[number] = known | found
    # A log that was cut can lack one of the two: then the generation is unknown, not 0.
    generates = {name for name, phase in framework.phases.items() if phase == "generate"}
    needed = generates if any(generates & timers.keys() for timers in steps.values()) else set()
    numbers = sorted(
        number for number, timers in steps.items() if timers.get(framework.step, 0.0) > 0 and needed <= timers.keys()
    )
    if not numbers:
        raise FormatError(f"{where}: {framework.format} logs no whole step here; expected lines with {framework.step}")
    whole = [steps[number] for number in numbers]
    seconds: dict[str, list[float]] = {}
    for at, timers in enumerate(whole):
        for name, value in timers.items():
            if name != framework.step and name not in framework.not_phases:
                phase = framework.phases.get(name, name.replace("_", "-").replace("/", "-"))
                seconds.setdefault(phase, [0.0] * len(whole))[at] += value
    step_s = np.array([timers[framework.step] for timers in whole])
    phases = {phase: np.array(column) for phase, column in seconds.items()}
    means = {name: math.fsum(timers.get(name, 0.0) for timers in whole) / len(whole) for name in set().union(*whole)}
    return PhaseLog(
        framework.format,
        framework.step_time(means, {phase: float(column.mean()) for phase, column in phases.items()}),
        np.array(numbers, dtype=np.int64),
        step_s,
        phases,
        tuple(sorted(steps.keys() - set(numbers))),
        _contradiction(step_s, [rates[number] for number in numbers]),
        tuple(restarts),
    )


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


def _numbers(words: str) -> dict[str, float]:
    """The numbers of a dict as Python prints it, also as `np.float64(1.5)` or `tensor(1.5)`."""
    return {key: float(value) for key, value in re.findall(rf"'([^']+)': {_NUMBER}", words)}


def _verl(lines: Iterator[tuple[int, str]]) -> Iterator[Record]:
    """verl: a line of JSON a step (FileLogger), or `step:3 - key:value - key:value` on the console.

    Raises ValueError for JSON that is something else.
    """
    for number, line in lines:
        if line.startswith('{"'):  # the console shows the configuration as {'actor_rollout_ref': ...
            try:
                record = json.loads(line, parse_int=float)
                step, data = int(record["step"]), record["data"].items()
            except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"line {number}: {quoted(line, 80)} is no record of verl's FileLogger") from None
            # A time that is no number is an error, as NaN is.
            timers = {
                key: float(value) if isinstance(value, int | float) else math.nan
                for key, value in data
                if key.startswith("timing_s/") or key in _TOKENS
            }
            yield step, timers, None
        elif match := _VERL_STEP.search(line):
            pairs = re.findall(rf"(?<= - )([^\s:]+):{_NUMBER}", line)
            yield int(match[1]), {key: float(value) for key, value in pairs}, None


def _printed_dicts(lines: Iterator[tuple[int, str]]) -> Iterator[Record]:
    """OpenRLHF: `Global step 3: {'timing/...': 1.5, ...}`; slime: `perf 3: {'perf/rollout_time': 1.5, ...}`, one of the
    rollout and one of the trainer.
    """
    for _, line in lines:
        if match := re.search(r"(?:Global step|\bperf) (\d+): (\{.*)", line):
            yield int(match[1]), _numbers(match[2]), _time_of_day(line[: match.start()])


def _time_of_day(words: str) -> float | None:
    """Seconds since some year, as a logger prints the time in front of a message; None if it does not."""
    found = _CLOCK.search(words)
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(one or 2000) for one in found.groups())
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _nemo_rl(lines: Iterator[tuple[int, str]]) -> Iterator[Record]:
    """NeMo-RL: `Total step time: 46.00s`, then a line for each timer. Steps are counted, because their numbers, above
    them in `=== Step 3/100 ===`, begin anew in each `=== Epoch 2/4 ===`; one that comes again has its old count.
    """
    steps, at = 0, {"Epoch": 0, "Step": -1}
    counts: dict[tuple[int, int], int] = {}
    values: dict[str, float] = {}
    for _, line in chain(lines, [(0, "")]):
        match = re.match(r"\W*([A-Za-z][\w/ ]*): (\d+(?:\.\d+)?)s\b", line)
        if match is None or match[1] == _NEMO_STEP:
            if values:
                steps = steps if at["Step"] < 0 else counts.setdefault((at["Epoch"], at["Step"]), steps)
                yield steps, values, None
                steps, at["Step"] = steps + 1, -1
            values = {}
        if match and (values or match[1] == _NEMO_STEP):
            values[match[1]] = float(match[2])
        elif head := _NEMO_HEAD.search(line):
            at[head[1]] = int(head[2])


def _serial(_: Mapping[str, float], __: Mapping[str, float]) -> StepTime:
    return StepTime.SERIAL


def _sum_or_clock(timers: Mapping[str, float], phases: Mapping[str, float]) -> StepTime:
    """OpenRLHF's synchronous trainer adds up its timers; the other one reads a clock, while the next batch is made. If
    timers are missing, those that are left overlap only if they are more than the step.
    """
    step_s, phases_s = timers["step_total"], math.fsum(phases.values())
    if math.isclose(step_s, phases_s, rel_tol=1e-6):
        return StepTime.SUMMED
    return StepTime.OVERLAPPED if phases_s > step_s * (1 + TOLERANCE) else StepTime.SERIAL


def _waits_for_rollout(timers: Mapping[str, float], phases: Mapping[str, float]) -> StepTime:
    """The trainer of slime waits for the whole rollout, unless that runs beside the training (`train_async.py`)."""
    waited = timers.get("train_wait", math.inf)
    return StepTime.OVERLAPPED if phases.get("generate", 0.0) > waited * (1 + TOLERANCE) else StepTime.SERIAL


#: verl's rate of tokens of a GPU, per second of the step, and the tokens of all GPUs.
_TOKENS = ("perf/throughput", "perf/total_num_tokens")
_VERL_STEP = re.compile(r"(?:^|\s)step:(\d+) - ")
_NEMO_STEP = "Total step time"
_NEMO_HEAD = re.compile(r"(?<!=)={5,} (Epoch|Step) (\d{1,18})\b")
FRAMEWORKS = (
    Framework(
        Format.VERL,
        re.compile(r"timing_s/(\w+)"),  # timing_s/agent_loop/... is within gen
        "step",
        {
            "gen": "generate",
            "old_log_prob": "old-log-prob",
            "ref": "ref-log-prob",
            "adv": "advantage",
            "update_actor": "train",
            "update_critic": "train-critic",
            "update_weights": "sync",
        },
        frozenset(
            # Within gen, as its workers time it; then what is before and after the step.
            ("generate_sequences", "reshard", "testing", "save_checkpoint", "start_profile", "stop_profile")
        ),
        _verl,
        _serial,
    ),
    Framework(
        Format.OPENRLHF,
        re.compile(r"timing/(\w+)"),
        "step_total",
        {"generation": "generate", "make_experience": "experience", "ppo_train": "train", "broadcast": "sync"},
        frozenset(),
        _printed_dicts,
        _sum_or_clock,
    ),
    Framework(
        Format.SLIME,
        re.compile(r"perf/(\w+)_time"),
        "step",
        {
            "rollout": "generate",
            "log_probs": "old-log-prob",
            "ref_log_probs": "ref-log-prob",
            "actor_train": "train",
            "update_weights": "sync",
        },
        # The step is train_wait + train. train_wait is around rollout, update_weights (which was before this step) and
        # data_preprocess; train is around the others.
        frozenset(("train_wait", "train")),
        _printed_dicts,
        _waits_for_rollout,
    ),
    Framework(
        Format.NEMO_RL,
        re.compile(r"([\w ]+|\w+/total)"),  # the other timers with a slash are within NAME/total
        _NEMO_STEP,
        {
            "generation": "generate",
            "policy_training": "train",
            "policy_and_reference_logprobs": "old-log-prob",
            "reward_calculation": "reward",
            "prepare_for_generation/total": "sync",
            "weight_sync": "sync",
            "prepare_for_generation": "sync",
        },
        frozenset(),
        _nemo_rl,
        _serial,
    ),
)


def format_of(line: str) -> Format | None:
    """The framework that printed a line with times of a step, None for any other line."""
    if "timing_s/step" in line and (line.startswith("{") or _VERL_STEP.search(line)):
        return Format.VERL
    if "'timing/" in line and "Global step " in line:
        return Format.OPENRLHF
    if "'perf/" in line and re.search(r"\bperf \d+: \{", line):
        return Format.SLIME
    return Format.NEMO_RL if f"{_NEMO_STEP}: " in line else None
