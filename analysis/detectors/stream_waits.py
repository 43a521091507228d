"""Streams of one GPU that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair
from tracekit.analysis.detectors.of_one_gpu import (
    MOST_OF_A_KIND,
    SMALLEST_SHARE,
    candidate,
    on_each,
    plain,
    share_of,
)
from tracekit.analysis.evidence.evidence import evidence
from tracekit.analysis.evidence.gpu_losses import idle_gpu
from tracekit.analysis.evidence.graph_subject import RecordingSubject
from tracekit.analysis.evidence.launches import LATEST_ARRIVAL_S
from tracekit.analysis.graph.op_graph import Why
from tracekit.analysis.numeric.codes import numbered
from tracekit.base.text import code_name
from tracekit.report.finding import Spent
from tracekit.report.verdict import LossKind
from tracekit.trace.gpu_activity import IdleReason, KernelClass

_MOST_NAMES = 8


class StreamWaits(Detector):
    """A stream has work, and waits for an event of another stream.

    Paper: not seen. tracekit replays the recording without the dependency: at most that is saved, if the work does not
    need what the other stream did. Waits for communication are priced as such.
    """

    kind = "stream-waits"
    title = "A stream waits for another one"
    signature = "an op that was launched, and begins as an op of another stream ends whose event its stream waits for"
    refuted_by = "the op reads what the other stream wrote just before"
    next_check = "which tensors the waiting op shares with the other stream (torch.cuda.Stream.wait_stream, wait_event)"
    suggested_fix = "wait only for what the op needs, or give the other stream its work earlier"
    loss = LossKind.IDLE
    repair = Repair("no-stream-wait", "Let the streams run at the same time", assumes="they share no data")

    def find(self, job: RecordingSubject) -> Iterator[Candidate]:
        """See `Detector.find`; only waits that the profiler recorded count."""
        graph, ops = job.graph.ops, job.ops
        if idle_gpu(job) is None or not stream_waits_recorded(job):
            return
        end, alike = graph.start + graph.duration, (ops["kind"] == str(KernelClass.COMMUNICATION)).to_numpy()
        event = (graph.why == Why.EVENT) & ~alike[graph.before]
        ready = np.full(len(end), -np.inf)
        np.maximum.at(ready, graph.after[~event], end[graph.before[~event]])
        waited_s = end[graph.before] - ready[graph.after]
        since_s = graph.start[graph.after] - end[graph.before]
        waits = np.flatnonzero(event & (waited_s > 0) & (since_s <= LATEST_ARRIVAL_S))
        stream = [ops["stream"].gather(side[waits]) for side in (graph.after, graph.before)]
        pair = numbered(*stream)
        by_pair = np.bincount(pair, waited_s[waits])
        for number in np.argsort(-by_pair, kind="stable")[:MOST_OF_A_KIND].tolist():
            taken_s = float(by_pair[number])
            if share_of(job, taken_s) < SMALLEST_SHARE:
                return
            edges = waits[pair == number]
            waiting, other = (side[int(np.flatnonzero(pair == number)[0])] for side in stream)
            gone = np.zeros(len(event), np.bool_)
            gone[edges] = True
            longest = edges[np.argsort(-waited_s[edges], kind="stable")]
            names = ops["name"].gather(graph.before[longest]).unique(maintain_order=True).to_list()[:_MOST_NAMES]
            then = ops["name"][int(graph.after[longest[0]])]
            yield candidate(
                self.kind,
                job,
                Spent(IdleReason.QUEUED, names[0], "", (*names, other, waiting), len(edges), taken_s),
                f"{waiting} waits {on_each(job, taken_s)} for {other}: {code_name(then)} begins as"
                f" {code_name(names[0])} ends",
                job.pace.without_edges(gone),
                suggested_fix=plain(
                    f"let {waiting} wait only for what {code_name(then)} needs of {other}, or launch"
                    f" {code_name(names[0])} earlier"
                ),
                bound=True,
            )


@evidence(RecordingSubject)
def stream_waits_recorded(job: RecordingSubject) -> bool:
    """Whether the profiler recorded which stream waits for which."""
    return bool((job.graph.ops.why == Why.EVENT).any())
