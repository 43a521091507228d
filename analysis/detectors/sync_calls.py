"""Calls in which a rank waits for its GPU and its peers do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.of_one_gpu import (
    MOST_OF_A_KIND,
    SMALLEST_SHARE,
    candidate,
    on_each,
    plain,
    share_of,
)
from tracekit.analysis.detectors.rank_behind import rank_behind
from tracekit.analysis.evidence.gpu_losses import idle_gpu
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.host_time import host_time
from tracekit.analysis.evidence.launches import unnamed_saves, waiting_calls, without_waits
from tracekit.analysis.gpu.part import Part
from tracekit.analysis.numeric.arrays import Bools
from tracekit.analysis.numeric.codes import numbered
from tracekit.analysis.whatif.interventions import Intervention, Together
from tracekit.base.text import code_name
from tracekit.report.finding import Spent
from tracekit.report.verdict import LossKind
from tracekit.trace.gpu_activity import IdleReason

if TYPE_CHECKING:
    from tracekit.analysis.gpu.recorded import HostWhat


class SyncCalls(Detector):
    """A rank waits for its GPU in calls that its peers do not make, so it cannot launch ahead.

    Paper: not seen, because host calls are not traced. tracekit replays the recording without the extra calls: their
    host goes on at once, and the GPU finds the next kernels launched.
    """

    kind = "sync-calls"
    title = "A rank waits for its GPU more often than its peers"
    signature = "synchronising calls of one rank beyond those of its peers, after which its kernels are launched late"
    refuted_by = "the calls wait for what the peers wait for elsewhere"
    next_check = "which lines call .item(), .cpu() or print tensors on this rank (torch.cuda.set_sync_debug_mode)"
    suggested_fix = "remove the calls that wait for the GPU on {ranks}: .item(), .cpu(), printing of tensors"
    part = "host"
    loss = LossKind.HOST
    stragglers_where_few = True
    repair = Repair("remove-sync-calls", "Remove the calls that wait for the GPU", "none that its peers do not make")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        yield from self._in_one_gpu(job)
        late = rank_behind(job, Part.SYNC_CALLS)
        if late is not None:
            effect = f"waits for its GPU in {late.ops:,} calls, its peers in {late.usual_ops:,}"
            yield late.candidate(self.kind, effect, freed=True)

    def _in_one_gpu(self, job: RecordingSubject) -> Iterator[Candidate]:
        """The calls that wait, by operator and line, from the recording of one rank."""
        if idle_gpu(job) is None:
            return
        waiting = waiting_calls(job, allocates=False)
        rows, waited_s = waiting.rows, waiting.waited_s
        if not len(rows):
            return
        table = waiting.table
        place = numbered(table["name"], table["operator"], table["own"])
        by_place = np.bincount(place, waited_s)
        saving = _saving(job)
        for number in np.argsort(-by_place, kind="stable")[:MOST_OF_A_KIND].tolist():
            if share_of(job, by_place[number]) < SMALLEST_SHARE:
                return
            of_place = rows[place == number]
            if 2 * np.count_nonzero(saving[of_place - 1]) > len(of_place):
                continue  # a checkpoint is to be written elsewhere, which needs what it waits for
            call, op, line = table.row(int(np.flatnonzero(place == number)[0]))
            calls = np.zeros(job.ops.height, np.bool_)
            calls[of_place] = True
            name = op or call
            where = f" at {code_name(line)}" if line else ""
            names, waited = tuple(text for text in (op, call) if text), float(by_place[number])
            yield candidate(
                self.kind,
                job,
                Spent(IdleReason.SYNCHRONISE, name, line or "", names, len(of_place), waited),
                f"{code_name(name)}{where} waits for the GPU {len(of_place):,} times, {on_each(job, waited)}",
                Together((_without_dispatch(job, op, line), without_waits(job, calls))),
                title="The host waits for the GPU",
                next_check="torch.cuda.set_sync_debug_mode('warn') names the lines",
                suggested_fix=plain(
                    f"do without {code_name(name)}{where} in the loop, if nothing branches on the value: keep it on the"
                    " GPU, log every N steps, copy with non_blocking=True"
                ),
            )


#: Operators that only read a value of the GPU, and what they are called by.
_READS = {"aten::_local_scalar_dense": "aten::item", "aten::item": "aten::item"}


def _saving(job: RecordingSubject) -> Bools:
    """Which host ops mostly write checkpoints, [ops]; a call that waits follows its own."""
    work = host_time(job)
    saves = work.mask(IdleReason.CHECKPOINT) | unnamed_saves(job)
    spent_s = (np.bincount(work.op[of], work.seconds[of], job.ops.height) for of in (saves, ~saves))
    return np.greater(*spent_s)


def _without_dispatch(job: RecordingSubject, op: str | None, line: str | None) -> Intervention:
    """Return the job without the host work of an operator at a line, if it only reads a value, and without the Python
    of a function that launches nothing, as a hook that waits to take the time; else as it is.
    """
    work, names = host_time(job), {op, _READS[op]} if op in _READS else set()
    only_waits = False
    if line and "own" in job.ops.columns:
        launching = job.ops["own"].gather(np.unique(work.launched_by[work.launched_by >= 0]))
        only_waits = not launching.cast(pl.String).eq(line).any()

    def belongs(what: HostWhat) -> bool:
        own = what.name.rpartition(" in ")[2] in names or (only_waits and what.reason == IdleReason.PYTHON)
        return what.where == (line or "") and own

    return work.less(work.mask(*IdleReason, where=belongs))
