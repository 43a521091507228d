"""A DP rank that gets more data than the others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import structs

from tracekit.analysis.detectors.detector import Candidate, Detector, Repair, Treatment, only_in
from tracekit.analysis.detectors.episode_figures import chance_figures, time_of_episodes
from tracekit.analysis.detectors.rank_behind import compared
from tracekit.analysis.evidence.compute_profile import SMALLEST_FACTOR
from tracekit.analysis.evidence.pipeline_subject import PipelineSubject
from tracekit.analysis.evidence.slow_workers import data_factor, optimizer_factor, ranks_with_more_data
from tracekit.analysis.evidence.subject import Subject
from tracekit.analysis.whatif.interventions import Scale
from tracekit.base.text import seconds
from tracekit.report.finding import Figure, Place, Unit, confidence_from


class DataSkew(Detector):
    """A DP rank has more data than the others: its ops take longer on all stages, in proportion.

    Paper: no signature; finds sequence lengths by the correlation of forwards and backwards, which a slow worker raises
    as well. tracekit separates what the stages of a DP rank share from what a worker adds, so it still names a bad
    worker next to the skew. Machines that are slow as a whole show in their optimizer, which does not depend on tokens.
    The rule needs a pipeline: with one stage, data and machine cannot be separated.
    """

    kind = "data-skew"
    title = "A DP rank gets more data than the others"
    signature = (
        "forwards and backwards of one DP rank take longer by one factor on all its stages; its optimizer does not"
    )
    refuted_by = "its microbatches have as many tokens, and as long sequences, as those of other DP ranks"
    next_check = "tokens and sum of squared sequence lengths per DP rank and step; the sampler's shards"
    suggested_fix = "have the sampler deal microbatches over DP ranks by cost, not by count"
    part = "workload"
    label = "uneven work"
    treatment = Treatment.BALANCE_DATA
    repair = Repair("even-work", "Give the rank the same work as its peers", "the same work as its peers")

    def find(self, job: Subject) -> Iterator[Candidate]:
        kernels = compared(job)
        if kernels is not None and kernels.uneven:
            extra = f"{kernels.own:,} {kernels.op}s ({seconds(kernels.own_s)})"
            effect = f"runs {extra} of shapes or counts that not all peers have"
            yield structs.replace(
                kernels.behind.candidate(self.kind, effect),
                title="A rank has more work than the others",
                next_check=f"which {kernels.op}s only this rank runs, and the shapes of their input",
                suggested_fix="give {ranks} the same work as its peers: shapes of its input, layers, experts",
            )
        yield from self._dp_ranks(job)

    @only_in(PipelineSubject)
    def _dp_ranks(self, job: PipelineSubject) -> Iterator[Candidate]:
        hit = ranks_with_more_data(job)
        profile = job.profile
        if profile is None or not hit.any():
            return
        members = np.flatnonzero(hit)
        excess = float(np.expm1(profile.ranks.level[members].min()))
        optimizer = float(np.median(optimizer_factor(job)[:, :, hit])) - 1
        figures = (
            Figure("compute beyond that of other DP ranks, on all stages", excess, SMALLEST_FACTOR, Unit.SHARE),
            *chance_figures(profile.ranks, hit),
            Figure("optimizer beyond that of other DP ranks", optimizer, 0.0, Unit.SHARE),
        )
        share = np.where(hit, data_factor(job), 1.0)
        even = share.mean(axis=1, keepdims=True) / share  # the total amount of data stays
        change = Scale(job.table, even[None, None, None, None])
        series = profile.rank_by_step[:, members].mean(axis=1)
        yield Candidate(
            self.kind,
            Place(dp_ranks=tuple(job.dp_ranks[int(at)] for at in members)),
            f"{'takes' if len(members) == 1 else 'take'} at least {excess:.0%} longer than other DP ranks, on all"
            f" {job.stages} stages; the optimizers take {optimizer:.0%} longer, so it is not the machines",
            figures,
            confidence_from(figures[:2]),
            change,
            series,
            time_of_episodes(job, profile.ranks, int(members[0])),
        )
