"""How much more recording an event costs than the gaps between events show, on jobs without a GPU.

python -m benchmarks profiler-cost [ROUNDS]

Runs small jobs of torch on one thread of the CPU, by turns without the profiler and with it, with and without shapes
and stacks, and compares the CPU time that recording added to a step with what the gaps between events add up to.
The importer's factors (`host_work.py`) are of an earlier, smaller run on an idle machine; a busy one prints more.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from tracekit.collectors.importers.kineto.host_work import OF_FUNCTION_GAP, OF_GAP
from tracekit.collectors.importers.kineto.rank_columns import read_file

_STEPS, _WARM = 12, 3
Step = Callable[[], object]


class TimedRecording(NamedTuple):
    """A recorded job: what recording added to a step, and what gaps of operators and functions add up to, seconds."""

    job: str
    shapes: bool
    stacks: bool
    step_s: float
    added_s: float
    operators_s: float
    functions_s: float


def jobs() -> Iterator[tuple[str, Step]]:
    """Yield jobs of small operators: mostly dispatch, as of a job for which a GPU waits."""
    for width in (8, 256):
        parameters = [nn.Parameter(torch.randn(width)) for _ in range(120)]
        for parameter in parameters:
            parameter.grad = torch.randn(width)
        yield f"AdamW, a loop over parameters of {width}", torch.optim.AdamW(parameters, foreach=False).step
    layers: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
        "MLP": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()), 20, (4, 8)),
        "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4, (2, 4, 16)),
        "convolutions": (
            lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            12,
            (1, 4, 4, 4),
        ),
    }
    for name, (make, count, sizes) in layers.items():
        model, data = nn.Sequential(*[make() for _ in range(count)]), torch.randn(sizes)

        def forward(model: nn.Module = model, data: torch.Tensor = data) -> None:
            with torch.no_grad():
                model(data)

        def both(model: nn.Module = model, data: torch.Tensor = data) -> None:
            model(data).sum().backward()

        yield f"{name}, forward", forward
        yield f"{name}, forward and backward", both


def _usual(times: list[float]) -> float:
    """The lower quartile of CPU times after the first ones: other processes make steps longer, never shorter."""
    return sorted(times[_WARM:])[_STEPS // 4]


def _times(step: Step, steps: int, between: Callable[[], None] = lambda: None) -> list[float]:
    times = []
    for number in range(steps):
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
        if number + 1 < steps:
            between()
    return times


def seen(job: str, step: Step, folder: Path, *, shapes: bool, stacks: bool) -> TimedRecording:
    """Time some steps without the profiler, then record some."""
    file, plan = folder / "rank-0.json", schedule(wait=0, warmup=_WARM, active=_STEPS)
    plain_s = _usual(_times(step, _WARM + _STEPS))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes, with_stack=stacks, schedule=plan) as profiler:
        recorded_s = _usual(_times(step, _WARM + _STEPS, profiler.step))
    profiler.export_chrome_trace(str(file))
    events = Counter(event.get("cat") for event in json.loads(file.read_text())["traceEvents"])
    cost = read_file(file)[0].work.cost
    if cost is None:
        raise SystemExit(f"{job}: too few operators")
    return TimedRecording(
        job, shapes, stacks, plain_s, recorded_s - plain_s,
        cost.operator / OF_GAP * events["cpu_op"] / _STEPS,
        cost.function / OF_FUNCTION_GAP * events["python_function"] / _STEPS,
    )  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print a line for each job and way to record it, then the factors."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ways = [(shapes, stacks) for stacks in (False, True) for shapes in (False, True)]
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(int(arguments[0]) if arguments else 3):
            for name, step in jobs():
                for shapes, stacks in ways:
                    cost = seen(name, step, Path(folder), shapes=shapes, stacks=stacks)
                    costs.append(cost)
    of_operators = [cost.added_s / cost.operators_s for cost in costs if not cost.stacks]
    usual = statistics.median(of_operators)
    of_functions = [(cost.added_s - usual * cost.operators_s) / cost.functions_s for cost in costs if cost.stacks]
    for name in dict.fromkeys(cost.job for cost in costs):
        for shapes, stacks in ways:
            alike = [cost for cost in costs if (cost.job, cost.shapes, cost.stacks) == (name, shapes, stacks)]
            step, added, operators, functions = (
                1e3 * statistics.median(values) for values in zip(*[cost[3:] for cost in alike], strict=True)
            )
            said = OF_GAP * operators + OF_FUNCTION_GAP * functions
            way = "shapes " * shapes + "stacks " * stacks or "neither"
            print(
                f"{name:44s} {way:14s} step {step:6.2f} ms, recording adds {added:6.2f};"
                f" gaps {operators:5.2f} + {functions:5.2f}; added over said {added / said:.2f}"
            )
    ratio = sorted(
        cost.added_s / (OF_GAP * cost.operators_s + OF_FUNCTION_GAP * cost.functions_s)
        for cost in costs
        if cost.added_s
    )
    print(f"operators: {_words(of_operators)}; functions: {_words(of_functions)}; added over said: {_words(ratio)}")


def _words(values: list[float]) -> str:
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    return f"median {statistics.median(ordered):.2f}, 90 % of {len(ordered)} between {low:.2f} and {high:.2f}"
