"""Whether the GPUs that were sampled explain why workers are slow.

In: a pipeline; what `tracekit collect` sampled of each rank's GPU, in the trace's metadata. Out: clocks of slow workers
and of their peers, and whether the hardware is at fault.

A GPU is judged against others of its model only. A share of samples at the power cap says nothing: under load, every
data-center GPU reaches its cap. Nor does a GPU that a peer shares, or a worker that is slow in its forwards alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from statistics import median
from typing import Any

from msgspec import Struct

from tracekit.analysis.evidence.compute_profile import SMALLEST_FACTOR
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import slow_kind, worker_factor
from tracekit.analysis.evidence.subject import Subject, evidence
from tracekit.trace.canonical import share_of_samples
from tracekit.trace.model import Worker

#: Reasons for a lower clock that no healthy GPU has under load, as `tracekit collect` names them.
FAULTS = frozenset({"hw-slowdown", "sw-thermal-slowdown", "hw-thermal-slowdown", "hw-power-brake"})
#: A GPU with faults in this share of its samples is slow because of them; short ones are normal.
FAULTY_SHARE = 0.05
#: A lower clock is to blame if it explains more than this share of what a worker is slow by: at half the clock, work
#: that only computing limits takes twice as long.
EXPLAINED_SHARE = 0.5
#: No GPU has such a clock.
HIGHEST_MHZ = 1e5


class SampledGpu(Struct, frozen=True):
    """One sampled GPU. `sm_mhz`: its median clock, None if unknown. `faulty`: the share of samples with a reason of
    `FAULTS`, None if reasons were not sampled.
    """

    uuid: str | None
    model: str | None
    sm_mhz: float | None
    faulty: float | None


class GpuClocks(Struct, frozen=True):
    """Median clocks of slow workers' GPUs and of the others', MHz."""

    own_mhz: float
    peers_mhz: float

    def explain(self, factor: float) -> bool:
        """Whether the lower clock explains most of a slowdown by `factor`."""
        return self.peers_mhz / self.own_mhz - 1 > EXPLAINED_SHARE * (factor - 1)


@evidence(PipelineSubject)
def cards_of(job: PipelineSubject) -> dict[Worker, SampledGpu]:
    """The sampled GPU of each worker, as far as the trace's metadata has it."""
    gpus = job.trace.metadata.get("gpus")
    sampled = gpus if isinstance(gpus, dict) else {}
    of_workers = {worker: sampled.get(str(rank)) for worker, rank in job.worker_ranks.items()}
    return {worker: _card(gpu) for worker, gpu in of_workers.items() if isinstance(gpu, dict)}


def _card(gpu: Mapping[str, Any]) -> SampledGpu:
    spread, reasons = gpu.get("sm_mhz"), gpu.get("reasons")
    mhz = spread.get("median") if isinstance(spread, dict) else None
    shares = [share_of_samples(reasons.get(fault, 0.0)) for fault in FAULTS] if isinstance(reasons, dict) else []
    uuid, model = gpu.get("uuid"), gpu.get("model")
    return SampledGpu(
        uuid if isinstance(uuid, str) else None,
        model if isinstance(model, str) else None,
        float(mhz) if isinstance(mhz, int | float) and 0 < mhz < HIGHEST_MHZ else None,
        max((share for share in shares if share is not None), default=None),
    )


def shares_card(job: Subject, workers: Iterable[Worker]) -> bool:
    """Whether one of `workers` computes on the GPU of another worker."""
    slow, cards = set(workers), cards_of(job) or {}
    own = {cards[worker].uuid for worker in slow & cards.keys()} - {None}
    return any(card.uuid in own for worker, card in cards.items() if worker not in slow)


def clocks_of(job: PipelineSubject, workers: Iterable[Worker]) -> GpuClocks | None:
    """The clocks of the GPUs of `workers` and of others of the same models; None if one of them is unknown."""
    own, peers = _own_and_peers(job, workers)
    own_mhz, peers_mhz = ([card.sm_mhz for card in cards if card.sm_mhz is not None] for cards in (own, peers))
    return GpuClocks(median(own_mhz), median(peers_mhz)) if own_mhz and peers_mhz else None


def report_faults(job: Subject, workers: Iterable[Worker]) -> bool | None:
    """Whether the GPUs of `workers` report faults that their peers do not; None if nothing is known of either."""
    own, peers = _own_and_peers(job, workers)
    if not peers or all(card.faulty is None for card in own):
        return None
    return _faulty(own) and not _faulty(peers)


class Sampled(Enum):
    """What the samples of GPUs say of workers that are slow on them."""

    NOTHING = "nothing"
    FAULTY = "they report faults, and no clock says otherwise"
    SAME_CARD = "a worker that is not slow computes on the same GPU"
    LOW_CLOCK = "their clock explains it, without a fault"
    SAME_CLOCK = "they run at the clock of the others"


def sampled(job: PipelineSubject, workers: Sequence[Worker]) -> Sampled:
    """Why `workers` are slow, as far as samples of their GPUs show it.

    A slow compute alone shows no fault: user code, data or a neighbour on the cores slow it down just as well.
    """
    hit = job.cells_of(workers)
    if job.profile is None or not workers or slow_kind(job, hit) is not None:
        return Sampled.NOTHING
    if shares_card(job, workers):
        return Sampled.SAME_CARD
    clocks, factor = clocks_of(job, workers), float(worker_factor(job)[hit].min())
    explained = clocks is None or clocks.explain(factor)
    if explained and factor >= 1 + SMALLEST_FACTOR and report_faults(job, workers):
        return Sampled.FAULTY
    if clocks is None:
        return Sampled.NOTHING
    return Sampled.LOW_CLOCK if explained else Sampled.SAME_CLOCK


def _own_and_peers(job: Subject, workers: Iterable[Worker]) -> tuple[list[SampledGpu], list[SampledGpu]]:
    """The GPUs of `workers`, and those of the other workers that are of the same models."""
    slow, cards = set(workers), cards_of(job) or {}
    own = [card for worker, card in cards.items() if worker in slow]
    models = {card.model for card in own}
    return own, [card for worker, card in cards.items() if worker not in slow and card.model in models]


def _faulty(cards: Iterable[SampledGpu]) -> bool:
    shares = [card.faulty for card in cards if card.faulty is not None]
    return bool(shares) and median(shares) >= FAULTY_SHARE
