"""A job whose host pays for being recorded, and the same job without a profiler: an oracle.

Of what recording an event costs, only a part shows as a gap between events; the rest makes the work in between longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.kineto_files import all_reduce, document, event, kernel, write

#: What recording costs, by the gap that shows it (docs/kineto.md).
OF_GAP, OF_FUNCTION_GAP = 2.3, 0.6
#: Microseconds: a launch without a profiler, until a kernel arrives, a small operator or function, a call that waits,
#: and a transfer once all ranks are there.
_LAUNCH, _ARRIVES, _SMALL, _WAIT, _TRANSFER = 2.0, 5.0, 0.1, 3.0, 50.0


@dataclass
class RecordedJob:
    """Each step runs `units`: two Python functions (with `stacks`), an operator with two small ones inside, a kernel.

    `work_us`: host work of a unit, its launch included; `kernel_us`: of the GPU. `gap_us`: what a recording
    shows between small operators, 0 for a job without a profiler; `function_gap_us`: between functions. `waits`: after
    so many units the host waits for the GPU, 0 for never. `slow`: how much more recording costs, by step.
    """

    units: int = 40
    steps: int = 5
    work_us: float = 20.0
    kernel_us: float = 4.0
    gap_us: float = 2.0
    function_gap_us: float = 0.5
    stacks: bool = False
    waits: int = 0
    slow: Sequence[float] = (1.0,) * 16
    events: list[dict[str, Any]] = field(default_factory=list)
    now_us: float = 0.0
    gpu_us: float = 0.0
    launched: int = 0

    @property
    def operator_us(self) -> float:
        """What recording an operator costs."""
        return OF_GAP * self.gap_us

    def run(self) -> float:
        """Run the job: the median length of a step, microseconds."""
        ends = [0.0]
        for step in range(self.steps):
            self.step(step)
            ends.append(max(self.gpu_us, self.now_us))
        lengths = sorted(then - before for before, then in pairwise(ends))
        return lengths[len(lengths) // 2]

    def step(self, step: int) -> None:
        """Run one step."""
        begin = self.now_us
        for unit in range(self.units):
            self._unit(self.slow[step])
            if self.waits and unit % self.waits == self.waits - 1:
                called = self.now_us
                self.now_us = max(self.gpu_us, called) + _WAIT
                self._event("cuda_runtime", "cudaDeviceSynchronize", called, self.now_us, correlation=0)
        self._event("user_annotation", f"ProfilerStep#{step + 3}", begin, self.now_us)

    def _event(self, category: str, name: str, begin: float, end: float, **args: Any) -> None:
        self.events.append(event(category, name, begin, end - begin, **args))

    def _unit(self, slow: float) -> None:
        gap, between = self.gap_us * slow, self.function_gap_us * slow * bool(self.gap_us)
        call = 2 * _LAUNCH if gap else _LAUNCH
        begin, added = self.now_us, 3 * OF_GAP * gap + OF_GAP * (2 * gap + call - _LAUNCH)
        end = begin + self.work_us + (added if gap else 0.0)
        if self.stacks and gap:
            end += 2 * OF_FUNCTION_GAP * (between + _SMALL)
            self._event("python_function", "m.py(3): small", begin, begin + _SMALL)
            second = begin + _SMALL + between
            self._event("python_function", "m.py(4): small", second, second + _SMALL)
            begin = second + _SMALL
        first = begin + gap + _SMALL
        self._event("cpu_op", "aten::mul", begin + gap, end)
        self._event("cpu_op", "aten::view", first, first + _SMALL)
        self._event("cpu_op", "aten::as_strided", first + _SMALL + gap, first + 2 * _SMALL + gap)
        self.launched += 1
        self._event("cuda_runtime", "cudaLaunchKernel", end - gap - call, end - gap, correlation=self.launched)
        start = max(self.gpu_us, end - gap - _LAUNCH + _ARRIVES)
        self.events.append(kernel("elementwise_kernel", start, self.kernel_us, correlation=self.launched))
        self.gpu_us, self.now_us = start + self.kernel_us, end


def recorded(folder: Path, job: RecordedJob) -> tuple[Path, float]:
    """Run a job of one rank, and write what its profiler recorded: where to, and the median step, microseconds."""
    step_us = job.run()
    write(folder / "rank0.json", document(job.events, 0, world=1))
    return folder, step_us


def run_together(jobs: Sequence[RecordedJob]) -> list[float]:
    """Run ranks that reduce their gradients at the end of each step: the length of each step, microseconds."""
    ends = [0.0]
    for step in range(jobs[0].steps):
        for one in jobs:
            one.step(step)
        start = max(one.gpu_us for one in jobs)
        for one in jobs:
            one.launched += 1
            called = one.now_us
            one.events.append(event("cuda_runtime", "cudaLaunchKernelExC", called, _LAUNCH, correlation=one.launched))
            one.now_us += _LAUNCH
            began = max(one.gpu_us, called + _ARRIVES)
            start = max(start, began)
        for one in jobs:
            began = max(one.gpu_us, one.now_us - _LAUNCH + _ARRIVES)
            end = start + _TRANSFER
            one.events.append(all_reduce(began, end - began, correlation=one.launched, ranks=range(len(jobs))))
            called, one.now_us = one.now_us, end + _WAIT
            one.events.append(event("cuda_runtime", "cudaDeviceSynchronize", called, one.now_us - called))
            one.gpu_us = end
        ends.append(max(one.now_us for one in jobs))
    return [then - before for before, then in pairwise(ends)]
