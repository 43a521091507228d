"""What frameworks print about the phases of a step, as facts, and what consoles and clipboards do to a log, undone.

Checked in the sources: verl's `ray_trainer.py`, `fully_async_trainer.py` and `agent_loop.py`, OpenRLHF's
`ppo_trainer.py` and `ppo_trainer_async.py`, slime's `actor.py` and `train_metric_utils.py`, NeMo-RL's `grpo.py`,
SkyRL's `trainer.py`, `fully_async_trainer.py` and `tracking.py`, open-instruct's `grpo_fast.py` and `model_utils.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain

from msgspec import Struct

from tracekit.base.text import quoted
from tracekit.trace.model import Format
from tracekit.trace.post_training import TRAINER_WAIT, StepTime

#: Colours, and what Ray puts before a line of a worker.
_DECORATION = re.compile(r"\x1b\[[0-9;]*m|^\s*\((?:[\w.:]+ )?pid=[^)]*\)\s*")
#: A number as Python prints it, also `np.float64(1.5)`, `'1.5'` and `1,251.5`.
NUMBER = r"(?:[\w.]+\()?['\"]?([-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d*)?|\d+(?:\.\d*)?|nan|inf)(?:[eE][-+]?\d+)?)"
#: A line that goes on with keys and values of the record above.
_KEYS = re.compile(
    r"(?:^|\s)-\s+['\"]?[A-Za-z_][\w/.@%()-]*\s*[:=]|^\s*['\"]?[A-Za-z_][\w.@%()-]*/[\w/.@%()-]+['\"]?\s*[:=]"
)
#: The rest of a key or of a value that a terminal has wrapped, and the widest of terminals.
_FRAGMENT = re.compile(r"[\w./:+-]+")
_WIDEST = 320
#: Spaces at both ends of a wrapped line may be gone.
_TRIMMED = 2
#: The most lines of a dict that is printed over several.
_MOST_LINES = 2000


def plain(line: str) -> str:
    """A line of a console without colours and without Ray's prefix."""
    return _DECORATION.sub("", _DECORATION.sub("", line)) if "\x1b" in line or "pid=" in line else line


def number(text: str) -> float:
    """The value that `NUMBER` matched."""
    return float(text.replace(",", "") if "," in text else text)


def pair_of(key: str) -> re.Pattern[str]:
    """Matches a key that begins so, and its number: `key:1.5`, `key: 1.5`, `key = 1.5`, `'key': np.float64(1.5)`."""
    return re.compile(rf"(?<![\w/.])((?:{key})[\w/.@%()-]*)['\"]?[ \t]*[:=][ \t]*{NUMBER}")


def pairs(text: str, wanted: re.Pattern[str]) -> dict[str, float]:
    """The keys with numbers in a text that `wanted`, a pattern of `pair_of`, matches."""
    return {key: number(value) for key, value in wanted.findall(text)}


def unwrapped(
    lines: Iterator[tuple[int, str]], begins: re.Pattern[str], word: str
) -> Iterator[tuple[int, re.Match[str]]]:
    """The match of each record's beginning, in its whole text: with the lines over which a terminal, or whoever pasted
    it, has spread it. `word`: is in each beginning.
    """
    first, text, prefix, width, last = 0, "", "", 0, 0
    for place, line in lines:
        if word in line and (match := begins.search(line)):
            if text:
                yield from _matched(begins, first, text)
            first, text, prefix, width, last = place, line[match.start() :], line[: match.start()], len(line), len(line)
        elif text:
            more = line.removeprefix(prefix)
            if joined := _joined(text, more, is_full=last + _TRIMMED >= width):
                text, last = joined, len(line)
            else:
                yield from _matched(begins, first, text)
                text = ""
    if text:
        yield from _matched(begins, first, text)


def _matched(begins: re.Pattern[str], first: int, text: str) -> Iterator[tuple[int, re.Match[str]]]:
    if match := begins.search(text):
        yield first, match


def _joined(text: str, more: str, *, is_full: bool) -> str | None:
    """A record with the line below it, None if that is no part of it. `is_full`: the line before was cut at the width
    of the terminal, so that a key or a value may go on.
    """
    keys = _KEYS.search(more) is not None
    wrapped = is_full and len(more) <= _WIDEST and _FRAGMENT.fullmatch(more.strip()) is not None
    if not more or not (keys or wrapped):
        return None
    ends, begins = text[-1], more[0]
    inside = is_full and not begins.isspace() and (begins.isdigit() or begins in ".:" or not ends.isdigit())
    return text + more if inside else f"{text} {more}"


def dicts(lines: Iterator[tuple[int, str]], begins: re.Pattern[str]) -> Iterator[tuple[int, str, str]]:
    """The step, what is before it in its line, and the dict, of each record that prints one, on one line or on many."""
    step, before, text, remaining = 0, "", None, 0
    for _, line in lines:
        if match := begins.search(line):
            if text:
                yield step, before, text
            step, before, text, remaining = int(match[1]), line[: match.start()], line[match.end() :], _MOST_LINES
        elif text is None:
            continue
        else:
            text, remaining = text + line, remaining - 1
        if remaining == 0 or (text.rstrip().endswith("}") and text.count("{") <= text.count("}")):
            yield step, before, text
            text = None
        elif not text.lstrip().startswith("{") and text.strip():
            text = None
    if text:
        yield step, before, text


def unnumbered(lines: Iterator[tuple[int, str]], wanted: re.Pattern[str]) -> Iterator[dict[str, float]]:
    """The values of each step of a log without step numbers: a key that comes again begins the next step."""
    values: dict[str, float] = {}
    for _, line in lines:
        for key, value in pairs(line, wanted).items():
            if key in values:
                yield values
                values = {}
            values[key] = value
    if values:
        yield values


#: A step's number, its values by their names as the framework prints them, and when it printed them; None if unknown.
Record = tuple[int, dict[str, float], float | None]
#: Two clocks, or a sum and its parts, differ by this share of a step at most.
TOLERANCE = 0.01
#: The clock of a console.
_CLOCK = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
#: Phases that lie in the step of some versions and behind that of others: arithmetic tells (`rl_logs.py`).
VALIDATION, CHECKPOINT = "validation", "checkpoint"
#: Our names of timers that several frameworks have, or have had under other names.
_ANYWHERE = {
    **dict.fromkeys(("testing", "validation", "validate", "eval", "evaluate", "evaluation"), VALIDATION),
    "total_validation_time": VALIDATION,
    **dict.fromkeys(("save_checkpoint", "save_checkpoints", "checkpointing", "checkpoint", "save"), CHECKPOINT),
    **dict.fromkeys(("save_model", "save_hf_model"), CHECKPOINT),
    **dict.fromkeys(("update_weights", "param_sync", "sync_weights", "weight_sync", "sync_rollout_weights"), "sync"),
    **dict.fromkeys(("broadcast", "weight_update", "update_weight", "broadcast_weights"), "sync"),
    **dict.fromkeys(("wait_prev_gen", "wait_for_generation_buffer", "wait_for_rollout"), TRAINER_WAIT),
}


class Framework(Struct, frozen=True):
    """How a framework reports times.

    `timer`: matches keys of timers, and its group is the timer's name. `step`: the timer of the whole step. `phases`:
    our names of its timers; those of `_ANYWHERE` count, too, and any other timer keeps its own. `not_phases`: timers
    inside others, or outside the step. `around`: timers around others: what those do not explain of them is a wait of
    the trainer. `stale`: whether values are those of a job that generates while it trains, where `generate` is the
    trainer's wait for samples. `begins`, `mark`: what begins its records, and is in one of their lines. `keys`:
    its keys with numbers, None if they are no such keys. `records`: reads lines, each with its number in the file, and
    raises ValueError.
    """

    format: Format
    timer: re.Pattern[str]
    step: str
    phases: Mapping[str, str]
    not_phases: frozenset[str]
    mark: str
    begins: re.Pattern[str]
    keys: re.Pattern[str] | None
    records: Callable[[Iterator[tuple[int, str]]], Iterator[Record]]
    step_time: Callable[[Mapping[str, float], Mapping[str, float]], StepTime]
    around: Mapping[str, frozenset[str]] = {}
    stale: Callable[[Mapping[str, float]], bool] = lambda _: False

    def phase(self, timer: str) -> str:
        """Our name of a timer."""
        common = _ANYWHERE.get(timer.lower().replace(" ", "_"))
        return self.phases.get(timer) or common or timer.replace("_", "-").replace("/", "-")


def _verl(lines: Iterator[tuple[int, str]]) -> Iterator[Record]:
    """verl: a line of JSON a step (FileLogger), or `step:3 - key:value - key:value` on the console.

    Raises ValueError for JSON that is something else, and for any other line of a file that begins with JSON.
    """

    def console() -> Iterator[tuple[int, str]]:
        of_logger = None
        for place, line in lines:
            is_record = line.startswith('{"')  # the console shows the configuration as {'actor_rollout_ref': ...
            if line and of_logger is None:
                of_logger = is_record
            if is_record or (line and of_logger):
                files.append(_of_file(place, line))
            yield place, line

    files: list[Record] = []
    for _, match in unwrapped(console(), _VERL_STEP, "step"):
        yield from files
        files.clear()
        yield int(match[1]), pairs(match.string[match.end(1) :], _VERL_PAIR), None
    yield from files


def _of_file(place: int, line: str) -> Record:
    try:
        record = json.loads(line, parse_int=float)
        step, data = int(record["step"]), record["data"].items()
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"line {place}: {quoted(line, 80)} is no record of verl's FileLogger") from None
    # A time that is no number is an error, as NaN is.
    values = {
        key: float(value) if isinstance(value, int | float) else math.nan
        for key, value in data
        if _VERL_VALUE.match(key)
    }
    return step, values, None


def _printed_dicts(begins: re.Pattern[str]) -> Callable[[Iterator[tuple[int, str]]], Iterator[Record]]:
    """OpenRLHF: `Global step 3: {'timing/...': 1.5, ...}`; slime: `perf 3: {'perf/rollout_time': 1.5, ...}`, one of the
    rollout and one of the trainer; SkyRL: `Step 3:`, and a dict over many lines, whose numbers are text.
    """

    def records(lines: Iterator[tuple[int, str]]) -> Iterator[Record]:
        for step, before, text in dicts(lines, begins):
            if values := pairs(text, _OF_DICTS):
                yield step, values, _time_of_day(before)

    return records


def _time_of_day(words: str) -> float | None:
    """Seconds since some year, as a logger prints the time in front of a message; None if it does not."""
    clock = _CLOCK.search(words)
    if clock is None:
        return None
    year, month, day, hour, minute, second = (int(part or 2000) for part in clock.groups())
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _nemo_rl(lines: Iterator[tuple[int, str]]) -> Iterator[Record]:
    """NeMo-RL: `Total step time: 46.00s`, then a line for each timer, below `=== Step 3/100 ===`. In runs of several
    epochs, `=== Epoch 2/4 ===`, those numbers begin anew: steps are counted from 0, and one that comes again has its
    old count. A validation is printed before its step.
    """
    steps, heads, epochs = 0, {"Epoch": 0, "Step": -1}, 1
    counts: dict[tuple[int, int], int] = {}
    values: dict[str, float] = {}
    ahead: dict[str, float] = {}
    for _, line in chain(lines, [(0, "")]):
        match = _NEMO_TIMER.match(line)
        if match is None or match[1] == _NEMO_STEP:
            if values:
                if heads["Step"] >= 0:
                    place = counts.setdefault((heads["Epoch"], heads["Step"]), steps)
                    steps = place if epochs > 1 else heads["Step"]
                yield steps, values, None
                steps, heads["Step"] = steps + 1, -1
            values = {}
        if match and match[1] in _NEMO_AHEAD:
            ahead[match[1]] = number(match[2])
        elif match and (values or match[1] == _NEMO_STEP):
            values, ahead = values | ahead | {match[1]: number(match[2])}, {}
        elif head := _NEMO_HEAD.search(line):
            heads[head[1]] = int(head[2])
            epochs = int(head[3] or 2) if head[1] == "Epoch" else epochs


def _open_instruct(lines: Iterator[tuple[int, str]]) -> Iterator[Record]:
    """open-instruct: a panel of rich a step, with a row for each kind of metric, wrapped at the width of the terminal:
    `│ time  total: 46.00 | training: 40.00 │`. Panels of validations name no step.

    `training` contains the wait for samples, but for the first versions, which call that `trainer_idling`.
    """
    rows: dict[str, str] = {}
    kind = ""
    for _, line in chain(lines, [(0, "")]):
        cells = _PANEL.search(line)
        if cells is None:
            values = pairs(rows.get("time", ""), _OF_PANEL)
            step = pairs(rows.get("other", ""), _OF_PANEL).get("training_step")
            if step is not None and "total" in values:
                waited_s = sum(values.get(name, 0.0) for name in _WITHIN_TRAINING)
                values["training"] = max(values.get("training", 0.0) - waited_s, 0.0)
                yield int(step), {f"time/{name}": value for name, value in values.items()}, None
            rows = {}
        elif len(cells[1]) <= _PANEL_EDGE:
            kind, _, text = cells[2].partition(" ")
            rows[kind] = text
        else:
            rows[kind] = f"{rows.get(kind, '')} {cells[2]}"


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
    """The trainer of slime waits for the whole rollout, unless that runs alongside the training (`train_async.py`)."""
    waited = timers.get("train_wait", math.inf)
    return StepTime.OVERLAPPED if phases.get("generate", 0.0) > waited * (1 + TOLERANCE) else StepTime.SERIAL


def _is_fully_async(values: Mapping[str, float]) -> bool:
    """True for verl's `fully_async_policy`, which sends weights to other GPUs, and its `one_step_off_policy`, which
    waits for the generation of the step before.
    """
    return any(_VERL_STALE.match(key) for key in values)


#: verl's rate of tokens of a GPU, per second of the step, and the tokens of all GPUs.
TOKENS = ("perf/throughput", "perf/total_num_tokens")
_VERL_STEP = re.compile(r"(?:^|\s)step\s*[:=]\s*(\d+)(?=\s+-\s|\s*-?\s*$|\s+\w+/[\w/]+\s*[:=])")
#: The values of dicts that are of interest.
_OF_DICTS = pair_of("timing/|perf/")
#: The values of verl that are of interest: its timers, and how its two sides spend the time.
_VERL_KEY = r"timing_s/|fully_async/|rollouter/|trainer/|perf/throughput|perf/total_num_tokens"
_VERL_VALUE, _VERL_PAIR = re.compile(_VERL_KEY), pair_of(_VERL_KEY)
_VERL_STALE = re.compile(r"fully_async/|timing_s/(?:timing_s/)?(?:param_sync|wait_prev_gen|sync_rollout_weights)$")
_NEMO_STEP = "Total step time"
_NEMO_TIMER = re.compile(rf"\W*([A-Za-z][\w/ ]*?)\s*[:=|]\s*{NUMBER}\s*s(?:ec(?:onds)?)?\b")
_NEMO_HEAD = re.compile(r"(?<!=)={5,} (Epoch|Step) (\d{1,18})(?:/(\d{1,18}))?\b")
_NEMO_AHEAD = frozenset(("Total validation time",))
_OPENRLHF_STEP = re.compile(r"Global step (\d+):(?=\s*\{|\s*$)")
_SLIME_STEP = re.compile(r"\bperf (\d+):(?=\s*\{|\s*$)")
#: A row of a panel, or of a row that is wrapped; rows begin with their kind, so many spaces from the edge at most.
_PANEL, _PANEL_EDGE = re.compile(r"│(\s+)(\S.*?)\s*│\s*$"), 3
_OF_PANEL = pair_of(r"\w")
_WITHIN_TRAINING = ("trainer_idle_waiting_for_inference", "trainer_waiting_for_data")
_SKYRL_STEP = re.compile(r"(?<!Global )\bStep (\d+):(?=\s*\{|\s*$)")
FRAMEWORKS = (
    Framework(
        Format.VERL,
        re.compile(r"timing_s/(?:timing_s/)?(\w+)"),  # timing_s/agent_loop/... is within gen
        "step",
        {
            "gen": "generate",
            "old_log_prob": "old-log-prob",
            "ref": "ref-log-prob",
            "adv": "advantage",
            "update_actor": "train",
            "update_critic": "train-critic",
        },
        # Within gen, as its workers time it; then what is before and after the step.
        frozenset(("generate_sequences", "reshard", "start_profile", "stop_profile")),
        "timing_s/",
        _VERL_STEP,
        _VERL_PAIR,
        _verl,
        _serial,
        stale=_is_fully_async,
    ),
    Framework(
        Format.OPENRLHF,
        re.compile(r"timing/(\w+)"),
        "step_total",
        {"generation": "generate", "make_experience": "experience", "ppo_train": "train"},
        frozenset(),
        "'timing/",
        _OPENRLHF_STEP,
        _OF_DICTS,
        _printed_dicts(_OPENRLHF_STEP),
        _sum_or_clock,
    ),
    Framework(
        Format.SLIME,
        re.compile(r"perf/(\w+)_time"),
        "step",
        {"rollout": "generate", "log_probs": "old-log-prob", "ref_log_probs": "ref-log-prob", "actor_train": "train"},
        # The step is train_wait + train.
        frozenset(("train",)),
        "'perf/",
        _SLIME_STEP,
        _OF_DICTS,
        _printed_dicts(_SLIME_STEP),
        _waits_for_rollout,
        # The weights were updated before this step.
        around={"train_wait": frozenset(("rollout", "update_weights", "data_preprocess", "sleep", "wake_up"))},
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
            "prepare_for_generation": "sync",
        },
        frozenset(),
        _NEMO_STEP,
        re.compile(rf"{_NEMO_STEP}\s*[:=|]\s*\d"),
        None,
        _nemo_rl,
        _serial,
    ),
    Framework(
        Format.SKYRL,
        re.compile(r"timing/(\w+)"),
        "step",
        {
            "generate": "generate",
            "fwd_logprobs_values_reward": "old-log-prob",
            "compute_advantages_and_returns": "advantage",
            "train_critic_and_policy": "train",
        },
        frozenset(("policy_train", "critic_train")),  # within train_critic_and_policy
        "timing/step'",
        _SKYRL_STEP,
        _OF_DICTS,
        _printed_dicts(_SKYRL_STEP),
        _serial,
    ),
    Framework(
        Format.OPEN_INSTRUCT,
        # Weights are sent by another thread, and generation runs alongside the training: their timers are no phases.
        re.compile(r"time/(total|training|saving|health_check|trainer_\w+)"),
        "total",
        {"training": "train", "saving": CHECKPOINT}
        | dict.fromkeys((*_WITHIN_TRAINING, "trainer_idling"), TRAINER_WAIT),
        frozenset(),
        "training_step:",
        re.compile(r"│.*\btraining_step:"),
        None,
        _open_instruct,
        _serial,
    ),
)


def formats_of(content: bytes, lines: Iterable[tuple[int, str]]) -> set[Format]:
    """The frameworks that printed times of steps among these lines of a file's content."""
    marked = [framework for framework in FRAMEWORKS if framework.mark.encode() in content]
    formats, whole = set[Format](), set[Format]()
    for _, line in lines if marked else ():
        formats |= {framework.format for framework in marked if _begins(framework, line)}
        whole |= {framework.format for framework in marked if not formats and _has_step(framework, line)}
        if len(formats) == len(marked):
            break
    return formats or whole


def _has_step(framework: Framework, line: str) -> bool:
    """Whether a line has the time of a step, which a step without its number has, too."""
    keys = [] if framework.keys is None else framework.keys.findall(line)
    return any(match[1] == framework.step for key, _ in keys if (match := framework.timer.fullmatch(key)))


def _begins(framework: Framework, line: str) -> bool:
    in_file = framework.format is Format.VERL and line.startswith('{"') and framework.mark in line
    return in_file or framework.begins.search(line) is not None
