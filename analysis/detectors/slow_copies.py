"""Copies between host and GPU that go through pageable memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.of_one_gpu import SMALLEST_SHARE, candidate, on_each, share_of
from tracekit.analysis.evidence.gpu_losses import idle_gpu
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.launches import without_waits
from tracekit.analysis.gpu.roofline import Card
from tracekit.analysis.whatif.interventions import LessTime, Together
from tracekit.base.text import three_digits
from tracekit.report.finding import Spent
from tracekit.report.verdict import LossKind

#: What pinned memory reaches where the card is not known: PCIe 4 with 16 lanes, bytes a second.
_USUAL_LINK_S = 24e9


class SlowCopies(Detector):
    """Data crosses from pageable memory: the driver copies it twice, and the host waits.

    Paper: not seen. tracekit replays the recording with these copies at the speed of the card's link, and with no call
    that waits for them.
    """

    kind = "slow-copies"
    title = "Copies go through pageable memory"
    signature = "copies from or to pageable memory, below the speed of the link"
    refuted_by = "copies from pinned memory take as long"
    next_check = "where the tensors come from: pin_memory=True in the loader, non_blocking=True in .to()"
    suggested_fix = "pin the memory (pin_memory=True), copy with non_blocking=True, and prefetch the next batch"
    loss = LossKind.INPUT
    repair = Repair("pinned-copies", "Copy from pinned memory, ahead of use", "the speed of the link")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        ops = job.ops
        if idle_gpu(job) is None or "bytes" not in ops.columns:
            return
        wanted = (
            ops["role"].eq("gpu")
            & ops["name"].cast(pl.String).str.contains("Pageable")
            & ops["bytes"].fill_null(0).gt(0)
        )
        copies = np.flatnonzero(wanted.fill_null(value=False).to_numpy())
        moved, spent_s = ops["bytes"].gather(copies).to_numpy(), ops["duration"].gather(copies).to_numpy()
        calls = np.zeros(ops.height, np.bool_)
        if "copied" in ops.columns:
            calls = ops["copied"].is_in(copies).fill_null(value=False).to_numpy()
        waited_s = float(ops["duration"].to_numpy()[calls].sum())
        seconds_all = float(spent_s.sum()) + waited_s
        if not len(copies) or share_of(job, seconds_all) < SMALLEST_SHARE:
            return
        card = Card.named(job.summary.gpu)
        less = np.zeros(ops.height)
        less[copies] = np.maximum(spent_s - moved / (card.link_s if card else _USUAL_LINK_S), 0.0)
        speed = float(moved.sum()) / (float(spent_s.sum()) or np.inf) / 1e9
        names = tuple(ops["name"].gather(copies).unique().sort().to_list())
        yield candidate(
            self.kind,
            job,
            Spent("transfer", names[0], "", names, len(copies), seconds_all),
            f"{three_digits(float(moved.sum()) / 1e6)} MB cross from or to pageable memory in"
            f" {on_each(job, float(spent_s.sum()))}, {three_digits(speed)} GB/s",
            Together((without_waits(job, calls), LessTime(less))),
        )
