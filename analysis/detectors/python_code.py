"""Python between launches, outside of any operator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.of_one_gpu import SMALLEST_SHARE, candidate, costly, on_each, plain, share_of
from tracekit.analysis.evidence.gpu_losses import idle_gpu
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_time import LONGEST_DISPATCH_S, host_time, in_head
from tracekit.analysis.evidence.launches import unnamed_saves
from tracekit.analysis.gpu.gpu_times import GpuTimes
from tracekit.base.text import code_name, seconds
from tracekit.report.finding import Spent
from tracekit.report.verdict import LossKind
from tracekit.trace.gpu_activity import IdleReason

if TYPE_CHECKING:
    from tracekit.analysis.gpu.recorded import HostWhat

#: Time of Python without a name is worth a sentence from this share of the recording on. No experiment.
_SMALLEST_UNNAMED_SHARE = 0.05
#: So many functions before the first op are counted and, of these, told.
_MOST_NAMES, _MOST_TOLD = 8, 3


#: Names of functions and modules, also if redacted, and of operators; others are annotations.
_FUNCTION = re.compile(r"\.pyx?\(\d+\): |^<|^nn\.Module: |^\w+::|^function \d")


def _function(what: HostWhat) -> str:
    """The own function that work is inside, or what it is where no stack was recorded."""
    return what.where or what.name


def _action(name: str, to: str) -> str:
    """What to do about a function, or about an annotation: of that, the functions inside have to be known first."""
    if _FUNCTION.search(name):
        return f"move {code_name(name)} {to}"
    fused = "use a fused or foreach optimizer; " if name.startswith("Optimizer.step") else ""
    return f"{fused}record with_stack=True to see which functions in {code_name(name)} take the time"


class PythonCode(Detector):
    """A function of Python takes time in which the GPU has nothing to do.

    Paper: not seen. tracekit replays the recording with its own time gone; callees that are operators keep theirs.
    """

    kind = "python-code"
    title = "The GPU waits for Python"
    signature = "time of a Python function, outside of operators and calls of the runtime, while the GPU is idle"
    refuted_by = "the function takes as long, and the GPU idles no longer, without the profiler's with_stack"
    next_check = "py-spy record on the process, without the profiler: recording stacks makes Python slower"
    suggested_fix = "move it out of the loop or to the GPU, or cache what it returns"
    loss = LossKind.HOST
    repair = Repair("no-python-between", "Take the function out of the way of launches")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        gpu = idle_gpu(job)
        if gpu is None:
            return
        yield from self._before_first(job)
        work = host_time(job)
        saves = unnamed_saves(job)
        parts = work.by_name(IdleReason.PYTHON, key=_function, among=~saves)
        later = (part for part in parts if not in_head(job)[part.parts].all())
        for part in costly(job, later):
            name = part.where or part.name
            inside = f", in {code_name(part.name)}" if part.name not in {"", name} else ""
            yield candidate(
                self.kind,
                job,
                Spent(IdleReason.PYTHON, part.name or name, part.where, part.names, part.count, part.seconds),
                f"{code_name(name)} takes {on_each(job, part.seconds)} between launches{inside}",
                work.less(part.parts),
                suggested_fix=plain(
                    f"let torch.compile or a CUDA graph spare the Python of {code_name(name)}, or call it less often"
                    if _FUNCTION.search(name) and part.seconds < LONGEST_DISPATCH_S * part.count
                    else _action(name, "out of the loop or to the GPU, or cache what it returns")
                ),
            )
        yield from self._unnamed(job, gpu)

    def _before_first(self, job: RecordingSubject) -> Iterator[Candidate]:
        """What the host does only before the first op of the GPU, but for waits and calls of the runtime."""
        work, reasons = host_time(job), (IdleReason.PYTHON, IdleReason.OPERATOR)
        only = (part for part in work.by_name(*reasons, key=_function) if in_head(job)[part.parts].all())
        parts = [*islice(only, _MOST_NAMES)]
        taken_s = sum(part.seconds for part in parts)
        if not parts or share_of(job, taken_s) < SMALLEST_SHARE:
            return
        longest = ", ".join(
            f"{code_name(part.where or part.name)} {seconds(part.seconds)}" for part in parts[:_MOST_TOLD]
        )
        first, rows = parts[0], np.concatenate([part.parts for part in parts])
        names = tuple(dict.fromkeys(name for part in parts for name in (part.where, *part.names) if name))
        reason = work.whats[work.what[first.parts[0]]].reason
        yield candidate(
            self.kind,
            job,
            Spent(reason, first.name or first.where, first.where, names, sum(part.count for part in parts), taken_s),
            f"before its first op, the GPU waits {on_each(job, taken_s)} for {longest}",
            work.less(rows),
            title="The GPU waits for its first op",
            suggested_fix=plain(
                _action(
                    first.where or first.name,
                    "to the loader's workers or to the GPU, or do it while the GPU still works on the batch before",
                )
            ),
        )

    def _unnamed(self, job: RecordingSubject, gpu: GpuTimes) -> Iterator[Candidate]:
        """Python of which nothing is known."""
        work = host_time(job)
        unnamed = work.mask(IdleReason.PYTHON, where=lambda what: not what.name and not what.where)
        parts = np.flatnonzero(unnamed & ~unnamed_saves(job))
        taken_s = float(work.seconds[parts].sum())
        if gpu.stacks or share_of(job, taken_s) < _SMALLEST_UNNAMED_SHARE:
            return
        tell = "no stack was recorded: record with_stack=True to see which functions it is"
        yield candidate(
            self.kind,
            job,
            Spent(IdleReason.PYTHON, "Python without a name", "", (), len(parts), taken_s, tell),
            f"Python outside of any operator takes {on_each(job, taken_s)}; which function cannot be told without"
            " stacks",
            work.less(parts),
            suggested_fix="record with_stack=True (torch.profiler) to see which functions take the time",
            bound=True,
        )
