"""The model of a job whose plans are compared: from a file, or fitted to the step times of runs."""

from __future__ import annotations

import csv
import math
import stat
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats
from tracekit.analysis.numeric.statistics import student_beyond
from tracekit.base.errors import FormatError
from tracekit.base.paths import unreadable
from tracekit.report.questions import ConfidenceInterval, RunLine, RunOfMicrobatches, StepLine
from tracekit.trace.compute_order import Schedule

#: Largest file that is read, bytes.
_LARGEST_FILE = 1 << 28
#: Most cells (stage, first layer, end) that a search holds in memory.
_MOST_CELLS = 5_000_000
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Slowness = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Microbatches = Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
#: Seconds that a microbatch of s samples takes: the first + the second x s.
_Line = tuple[_Amount, _Amount]
Fixed = Literal["fixed"]
#: How far true step times are from a line, relative, a standard deviation. Chosen.
OFF_THE_LINE = 0.005
#: Degrees of freedom that stand for that figure where no runs do. Chosen.
_FREEDOM = 30
_LARGEST = 1e9


def content_of(path: Path) -> bytes:
    """The content of a file. Raises FormatError if it is none, cannot be read, or is too large."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_FILE:
            raise FormatError(f"{path}: expected a file of at most {_LARGEST_FILE >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


class Layer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a layer takes and holds; without all three figures of memory, plans are searched by time only."""

    name: str = ""
    forward_s: _Line
    backward_s: _Line
    gradient_mb: _Amount
    state_gb: _Amount | None = None
    activation_gb: _Amount | None = None
    boundary_gb: _Amount | None = None


def layers_of(takes_s: Floats, fixed_s: Floats, gradients_mb: Floats) -> tuple[Layer, ...]:
    """Layers without figures of memory. `takes_s`: a sample's forward and backward in each, [2, layers]; `fixed_s`:
    what any microbatch's take beyond that, [2].
    """
    forward_s, backward_s = fixed_s.tolist()
    return tuple(
        Layer(forward_s=(forward_s, forward), backward_s=(backward_s, backward), gradient_mb=size)
        for forward, backward, size in zip(*takes_s.tolist(), gradients_mb.tolist(), strict=True)
    )


class Reduction(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that the reduction of a bucket takes. While a backward computes and gradients are reduced, both slow
    down: `compute_rate`, `reduce_rate`: how fast each is then, 1: as fast as alone. The oldest `at_once` buckets share
    the link. Behind the backward, buckets are copied in order, `copy_per_mb_s` each MB.
    """

    fixed_s: _Amount
    per_mb_s: _Amount
    compute_rate: _Rate = 1.0
    reduce_rate: _Rate = 1.0
    copy_per_mb_s: _Amount = 0.0
    at_once: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1

    @property
    def plain(self) -> bool:
        """Whether buckets are reduced one after the other, at one speed, and are not copied."""
        return self == Reduction(self.fixed_s, self.per_mb_s)


class TrainingPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """How a job runs. `split`: layers of each stage; `recompute`: stages that recompute their activations; `buckets`:
    of each stage, how many layers each bucket of gradients holds, from its last layer to its first.
    """

    split: tuple[_Count, ...]
    schedule: Schedule
    microbatches: _Microbatches
    recompute: tuple[bool, ...]
    buckets: tuple[tuple[_Count, ...], ...]


class Space(Struct, frozen=True, forbid_unknown_fields=True):
    """What may change; `fixed`: as in the plan in use."""

    schedule: list[Schedule] | Fixed = "fixed"
    microbatches: list[_Microbatches] | Fixed = "fixed"
    recompute: Literal["stages", "fixed"] = "fixed"
    split: Literal["free", "fixed"] = "fixed"
    buckets: Literal["free", "size", "one", "fixed"] = "fixed"


class PlanModel(Struct, frozen=True, kw_only=True, dict=True, forbid_unknown_fields=True):
    """A job as `docs/plans.md` defines it. `samples`: of a replica in a step; `memory_gb`: of a worker, None: any.
    `slowness`: how many times as long as on a usual worker each stage computes, as that of a slow worker; None: 1.
    `bucket_cap_mb`: the size of buckets in use, None if unknown.
    """

    model_version: Literal[1] = 1
    name: str = ""
    layers: tuple[Layer, ...]
    stages: _Count
    replicas: _Count
    samples: _Count
    transfer_s: _Line
    reduce: Reduction
    optimizer_s: _Amount
    memory_gb: _Amount | None = None
    slowness: tuple[_Slowness, ...] | None = None
    bucket_cap_mb: _Amount | None = None
    now: TrainingPlan
    space: Space

    @classmethod
    def read(cls, path: Path) -> PlanModel:
        """Read a model file. Raises FormatError if it is none, or contradicts itself."""
        try:
            model = msgspec.json.decode(content_of(path), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"{path}: {error}; expected a model file (docs/plans.md)") from None
        if problem := model.problem:
            raise FormatError(f"{path}: {problem}")
        return model

    @property
    def problem(self) -> str | None:
        """How the model contradicts itself, None if it does not."""
        layers, stages, now, space = len(self.layers), self.stages, self.now, self.space
        if not layers:
            return "no layers; describe each layer in `layers`"
        if layers < stages:
            return f"{layers} layers cannot fill {stages} stages; expected a layer or more for each stage"
        if stages * (layers + 1) ** 2 > _MOST_CELLS:
            return f"{layers} layers on {stages} stages are too many to search; join layers that stay together"
        if len(now.split) != stages or sum(now.split) != layers:
            return f"`now` splits {sum(now.split)} layers over {len(now.split)} stages; expected {layers} over {stages}"
        if self.slowness is not None and len(self.slowness) != stages:
            return f"`slowness` of {len(self.slowness)} stages; expected {stages}"
        if len(now.recompute) != stages:
            return f"`now` says of {len(now.recompute)} stages whether they recompute; expected {stages}"
        if tuple(map(sum, now.buckets)) != now.split:
            return "the `buckets` of `now` do not hold the layers of its `split`; expected all layers of each stage"
        for name in ("schedule", "microbatches"):
            if not getattr(space, name):
                return f'the space is empty: `{name}` has no values; list some, or write "fixed"'
        if Schedule.INTERLEAVED in (now.schedule, *space.schedule):
            return "schedule interleaved cannot be planned; expected gpipe or 1f1b"
        plain = self.reduce.plain
        if stages > 1 and (not plain or space.buckets == "size"):
            return "rates and copies of reductions, and buckets of one size, are planned on one stage only"
        if not plain and space.buckets == "free":
            return 'with rates or copies of reductions, buckets cannot be "free"; write "size", "one" or "fixed"'
        if space.buckets == "fixed" and space.split == "free":
            return '`buckets` cannot be fixed if the `split` is free; write "one" or "free", or keep the split, too'
        return None

    @property
    def kinds(self) -> list[tuple[Schedule, int]]:
        """The schedules of the space, each with every number of microbatches."""
        asked = ((getattr(self.space, name), getattr(self.now, name)) for name in ("schedule", "microbatches"))
        return list(product(*([now] if values == "fixed" else dict.fromkeys(values) for values, now in asked)))

    @property
    def knows_memory(self) -> bool:
        """Whether the memory of every layer is known."""
        return all(None not in (layer.state_gb, layer.activation_gb, layer.boundary_gb) for layer in self.layers)

    def of_layers(self, name: str, samples: float = 0.0) -> Floats:
        """A figure of each layer for a microbatch of so many samples, 0 if unknown, [layers]."""
        values = np.array([getattr(layer, name) or 0.0 for layer in self.layers])
        figures: Floats = values if values.ndim == 1 else values @ np.array([1.0, samples])
        return figures


def line_of_runs(path: Path, counts: Sequence[int]) -> RunLine:
    """The line T = a m + b through the step times of whole runs, and those of runs with these numbers of microbatches.

    A run's error is relative. Where runs of one count agree better than the line is true, the line's own error counts:
    across published runs of one model, others are off by up to 1 %. Raises FormatError as `_medians`.
    """
    microbatches, step_s = _medians(path)
    # A relative error: rows are weighted by the step time.
    rows = np.stack([microbatches, np.ones(len(microbatches))], axis=1) / step_s[:, None]
    inverse = np.linalg.inv(rows.T @ rows)
    a, b = inverse @ rows.sum(axis=0)
    freedom = len(rows) - 2
    off = float(np.sum((rows @ np.array([a, b]) - 1) ** 2))
    relative = math.sqrt((off + _FREEDOM * OFF_THE_LINE**2) / (freedom + _FREEDOM))
    times = []
    for count in counts:
        row = np.array([count, 1.0])
        value = float(row @ np.array([a, b]))
        error = relative * math.sqrt(float(row @ inverse @ row) + value**2) * student_beyond(0.025, freedom + _FREEDOM)
        times.append(RunOfMicrobatches(count, ConfidenceInterval(value, max(value - error, 0.0), value + error)))
    return RunLine(StepLine(float(a), float(b)), times)


def _medians(path: Path) -> tuple[Floats, Floats]:
    """The numbers of microbatches in a file of runs, and the median step time of each, seconds, [counts] both.

    Raises FormatError if it has no such columns, or runs of fewer than two counts.
    """
    try:
        rows = list(csv.DictReader(content_of(path).decode("utf-8-sig").splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"{path}: {error}; expected a CSV file") from None
    by_count: dict[float, list[float]] = {}
    for number, row in enumerate(rows, 2):
        values = [row.get(name) for name in ("microbatches", "step_time_s")]
        if None in values:
            raise FormatError(f"{path}: no column microbatches or step_time_s; expected microbatches,step_time_s")
        count, step_s = (_number(value) for value in values)
        if not (1 <= count <= _LARGEST and count % 1 == 0 and 0 < step_s <= _LARGEST):
            raise FormatError(f"{path}, line {number}: {','.join(map(str, values))}; expected a count and seconds")
        by_count.setdefault(count, []).append(step_s)
    if len(by_count) < 2:
        counts_text = f"one count of microbatches, {min(by_count):g}" if by_count else "no runs"
        raise FormatError(f"{path}: {counts_text}; a line needs runs with two counts or more")
    counts = sorted(by_count)
    medians = np.array([np.median(by_count[count]) for count in counts])
    if medians[-1] <= medians[0]:
        raise FormatError(f"{path}: steps of {counts[-1]:g} microbatches take no longer than those of {counts[0]:g}")
    return np.array(counts), medians


def _number(text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        return math.nan
