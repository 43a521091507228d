"""The experts of a job: loads, what uneven ones cost, and what other placements would save.

In: an `ExpertJob`, tokens of each expert if they were logged, plans. Out: `Experts`, the data of the report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct, structs

from tracekit.analysis.experts.balance import ExpertJob
from tracekit.analysis.experts.loads import Loads, balanced_placement, default_placement, loads_of_ranks
from tracekit.analysis.numeric.arrays import Floats, Ints
from tracekit.base.errors import FormatError, SelectionError
from tracekit.base.text import quoted
from tracekit.report.questions import CauseOfImbalance, ExpertCause, Experts, LayerLoads, LoadSource, Rebalanced


class ExpertLoadThresholds(Struct, frozen=True):
    """When loads of experts are uneven, and why."""

    #: Loads cost nothing worth a finding below this share of the step. Chosen: as other losses.
    cost_share: float = 0.01
    #: One expert a layer causes an imbalance if this share of it goes with its tokens beyond the mean. Definition:
    #: most.
    expert_share: float = 0.6
    #: Loads are equal if the heaviest rank has at most this share more than the mean. Chosen.
    equal: float = 0.05


EXPERT_LOADS = ExpertLoadThresholds()
#: Rows are those that the loads state if they differ by rounding only.
_ROUNDING = 1e-6
NO_LOADS = "no all-to-all was recorded on all ranks of its group; docs/plans.md says what shows loads"
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
#: The largest number of each plan that has one. Placing replicas takes time and memory with the square of their number.
_MOST = {"capacity": 1e6, "volume": 1e6, "replicas": 9_999}
_MOST_CHUNKS = 16


class RebalancePlan(Struct, frozen=True):
    """A plan to price, `kind`: "balanced" loads, "capacity" (at most `number` times the mean tokens for each expert),
    so many "replicas", tokens of `number` times the "volume", or as many "chunks" as are best.
    """

    text: str
    kind: str
    number: float = 1.0

    @classmethod
    def parse(cls, text: str) -> RebalancePlan:
        """Read "balanced", "capacity=1.25", "replicas=16", "volume=0.5" or "chunks". Raises SelectionError."""
        kind, equals, number = text.strip().lower().partition("=")
        if kind in {"balanced", "chunks"} and not equals:
            return cls(text, kind)
        if kind not in _MOST or not _NUMBER.fullmatch(number):
            raise SelectionError(
                f"--rebalance {quoted(text)}: not a plan; write balanced, capacity=C (at most C times the mean tokens"
                " for each expert), replicas=N (in all, equally many on each rank), volume=R (times the bytes of a"
                " token), or chunks"
            )
        value, whole = float(number), kind == "replicas"
        if not 0 < value <= _MOST[kind] or (whole and not value.is_integer()):
            raise SelectionError(
                f"--rebalance {quoted(text)}: expected a {'whole ' * whole}number above 0, at most {_MOST[kind]:,.0f}"
            )
        return cls(text, kind, value)


class ExpertLoads(Struct, frozen=True, eq=False, dict=True):
    """The loads of a job's experts. `logged`: tokens of each expert, None if not known. `cut`: see `Experts`."""

    recorded: ExpertJob
    logged: Loads | None = None
    cut: bool = False

    @cached_property
    def job(self) -> ExpertJob:
        """The job, with the rows that the log states if the recording has none."""
        job = self.recorded
        if self.logged is None or not job.has_experts:
            return job
        job = structs.replace(job, layers=len(self.logged.layers))
        if job.rows_known:
            return job
        pairs, steps = job.exchanges, np.unique(job.exchanges.step)
        stated, step_index = self._stated(self.logged.in_steps(steps)), np.searchsorted(steps, pairs.step)
        passes = np.zeros((len(np.unique(pairs.group)), *stated.shape[:2]))
        np.add.at(passes, (pairs.group[pairs.first], step_index[pairs.first], pairs.layer[pairs.first]), len(passes))
        share = stated[step_index, pairs.layer] / np.maximum(passes[pairs.group, step_index, pairs.layer], 1)[:, None]
        return structs.replace(job, rows=share[pairs.pair, pairs.place])

    @cached_property
    def source(self) -> LoadSource | None:
        """Where the tokens of each rank were read."""
        if not self.recorded.has_experts:
            return None
        if self.recorded.rows_known:
            return "splits"
        if self.logged is not None:
            return "loads"
        return "kernel-times" if self.job.runs else None

    @property
    def tokens_known(self) -> bool:
        """Whether it is known how many tokens each rank gets, and so what loads explain."""
        return self.source in {"splits", "loads"} and not (self.cut and self.logged is None)

    @cached_property
    def steps(self) -> Ints:
        """The steps of the recording, ascending; of loads alone, theirs."""
        if self.recorded.has_experts or self.logged is None:
            return np.unique(self.recorded.exchanges.step)
        return self.logged.steps

    @cached_property
    def _columns(self) -> tuple[Ints, Ints]:
        """Rank and group of each column of `by_rank`, [2, columns], and the column of each member, [members]."""
        pairs = self.job.exchanges
        columns, column = np.unique([pairs.rank, pairs.group[pairs.pair]], axis=1, return_inverse=True)
        return columns, column.ravel()

    @cached_property
    def by_rank(self) -> Floats:
        """The tokens of each rank in the first pass through each layer, [steps, layers, ranks of all groups]."""
        pairs, (columns, column) = self.job.exchanges, self._columns
        tokens = np.zeros((len(self.steps), int(pairs.layer.max(initial=-1)) + 1, columns.shape[1]))
        first = np.flatnonzero(pairs.first[pairs.pair])
        pair = pairs.pair[first]
        cell = np.searchsorted(self.steps, pairs.step[pair]), pairs.layer[pair], column[first]
        np.add.at(tokens, cell, self.job.tokens[first])
        return tokens

    @cached_property
    def _ratio(self) -> Floats:
        """The tokens of the heaviest rank of a group over the mean, the mean of all groups, [steps, layers]."""
        group = self._columns[0][1]
        by_group = [_over_mean(self.by_rank[..., group == number]) for number in np.unique(group)]
        return np.asarray(np.mean(by_group, axis=0))

    @cached_property
    def by_expert(self) -> Floats | None:
        """The tokens of each expert, [steps, layers, experts], None if they are not known."""
        return None if self.logged is None else self.logged.in_steps(self.steps - self.shift)

    @cached_property
    def shift(self) -> int:
        """What to add to the steps of the log: it may count from another one. Raises FormatError if none fits."""
        logged = self.logged
        if logged is None or not self.recorded.rows_known:
            return 0
        shifts = [0, *(int(self.steps[0] - first) for first in logged.steps)]
        for shift in shifts:
            if np.isin(self.steps - shift, logged.steps).all() and self._fits(logged.in_steps(self.steps - shift)):
                return shift
        logged.in_steps(self.steps)
        return 0

    def _fits(self, tokens: Floats) -> bool:
        stated = self._stated(tokens)
        return stated.shape == self.totals.shape and bool(np.allclose(stated, self.totals, rtol=_ROUNDING))

    @cached_property
    def totals(self) -> Floats:
        """The tokens of the ranks at each place of a group, over all groups, [steps, layers, ranks of a group]."""
        pairs, (columns, column) = self.job.exchanges, self._columns
        place = np.zeros(columns.shape[1], np.int64)
        place[column] = pairs.place
        return np.asarray(self.by_rank @ np.eye(self._width)[place])

    @property
    def _width(self) -> int:
        """The ranks of each group. Raises FormatError if groups differ."""
        widths = np.unique(self.recorded.exchanges.widths)
        if len(widths) != 1:
            raise FormatError(
                "the groups of experts have different sizes, so that loads do not say which ranks have them"
            )
        return int(widths[0])

    def _stated(self, tokens: Floats) -> Floats:
        """What each rank of a group gets of these tokens, [steps, layers, experts], with the experts in order."""
        return loads_of_ranks(tokens, default_placement(tokens.shape[-1], self._width), self._width)

    @cached_property
    def notes(self) -> list[str]:
        """What to know about the loads. Raises FormatError for loads of another job."""
        notes = [NO_LOADS] if self.source is None else []
        if notes and self.logged is not None:
            notes.append(f"{self.logged.source} is not used")
        if self.cut:
            notes.append("the profiler cut the lists of rows, so that no plan is priced")
        if self.shift:
            notes.append(f"step {self.steps[0] - self.shift} of the loads is step {self.steps[0]} of the recording")
        tokens = self.by_expert
        if tokens is None or self.source != "splits" or self._fits(tokens):
            return notes
        stated, recorded = self._stated(tokens), self.totals
        path = self.logged.source if self.logged is not None else ""
        layers = int(self.recorded.exchanges.layer.max()) + 1
        if stated.shape != recorded.shape or layers != stated.shape[1]:
            raise FormatError(
                f"{path}: {stated.shape[1]} layers of experts, the recording has {layers}; give its own loads"
            )
        share = abs(float(recorded.sum()) / (float(stated.sum()) or 1.0) - 1)
        if (stated >= recorded * (1 - _ROUNDING)).all():
            return [*notes, f"the ranks get {share:.1%} fewer tokens than the loads state: dropped beyond a capacity"]
        if (stated <= recorded * (1 + _ROUNDING)).all():
            return [*notes, f"the ranks get {share:.1%} more rows than the loads state: padding"]
        place = tuple(int(number) for number in np.argwhere(~np.isclose(stated, recorded, rtol=_ROUNDING))[0])
        raise FormatError(
            f"{path}: step {self.steps[place[0]]}, layer {place[1]}: rank {place[2]} gets {stated[place]:.6g} tokens,"
            f" in the recording {recorded[place]:.6g}; these are the loads of another job, or experts are not on ranks"
            " in order"
        )

    def layers(self) -> list[LayerLoads]:
        """The loads of each layer."""
        if self.source is None:
            return []
        by_rank, ratio = self.by_rank, self._ratio
        return [
            LayerLoads(
                layer,
                by_rank[:, layer].mean(axis=0).tolist(),
                None if self.by_expert is None else self.by_expert[:, layer].mean(axis=0).tolist(),
                float(ratio[:, layer].mean()),
                float(ratio[:, layer].std()),
            )
            for layer in range(by_rank.shape[1])
        ]

    @cached_property
    def excess(self) -> float:
        """The load of the heaviest rank over the mean, less 1, the mean of all layers and steps; nan if unknown."""
        ratios = [row.max_over_mean for row in self.layers()]
        return float(np.mean(ratios)) - 1 if ratios else float("nan")

    @cached_property
    def saved_s(self) -> float:
        """What equal loads save of a step, seconds; at least that, if only bounds are known; 0 without known loads."""
        if not self.tokens_known or not self.job.runs:
            return 0.0
        price = self.job.price("balanced", self.job.mean_loads)
        return self.job.step_s - (price.high_s or 0.0) if price.saved_s is None else price.saved_s

    @cached_property
    def explain(self) -> bool:
        """Whether known loads are so unequal that ranks are compared without them."""
        return self.tokens_known and self.job.runs and self.excess >= EXPERT_LOADS.equal

    def causes(self) -> list[CauseOfImbalance]:
        """Why ranks have unequal loads, if that costs a share of the step worth a finding.

        Times of kernels do not say whether a rank has more to do or is slow.
        """
        if not self.saved_s or self.saved_s < EXPERT_LOADS.cost_share * self.job.step_s:
            return []
        excess = self._ratio - 1
        uneven = [int(layer) for layer in np.flatnonzero(excess.mean(axis=0) > EXPERT_LOADS.equal)]
        heaviest = self.by_rank.mean(axis=0).argmax(axis=1)
        one_rank = int(self._columns[0][0, heaviest[0]]) if (heaviest == heaviest[0]).all() else None
        cause: ExpertCause = "skew" if one_rank is None else "hot-rank"
        expert = None
        if self.by_expert is not None:
            tokens = self.by_expert
            first = tokens.argmax(axis=2)
            capped = np.minimum(
                tokens,
                np.where(np.arange(tokens.shape[2]) == first[..., None], tokens.mean(axis=2, keepdims=True), np.inf),
            )
            # Of what the log states: it may state equal loads, of which the recording has more, as padding.
            removed = _over_mean(self._stated(tokens)) - _over_mean(self._stated(capped))
            if excess.sum() > 0 and removed.sum() / excess.sum() >= EXPERT_LOADS.expert_share:
                same = (first == first[0]).all(axis=0)
                cause = "hot-expert" if same.mean() >= 0.5 else "rotating"
                if cause == "hot-expert":
                    expert = int(np.bincount(first[0][same]).argmax())
                one_rank = one_rank if cause == "hot-expert" else None
        return [CauseOfImbalance(cause, one_rank, expert, uneven, self.saved_s)]

    def rebalanced(self, plan: RebalancePlan) -> Rebalanced:
        """The price of a plan, or why there is none."""
        if self.cut or self.source is None:
            return Rebalanced(plan.text, unknown="the rows that each rank sends and receives are not known")
        if plan.kind == "chunks":
            return self._in_chunks(plan)
        outcome, loads, tokens = Rebalanced(plan.text), self.job.mean_loads, self.by_expert
        if plan.kind == "volume":
            loads = self.job.tokens
        elif plan.kind in {"capacity", "replicas"}:
            if tokens is None:
                return structs.replace(outcome, unknown="the tokens of each expert are not known; give --expert-loads")
            if plan.kind == "capacity":
                capped = np.minimum(tokens, np.ceil(plan.number * tokens.mean(axis=2, keepdims=True)))
                outcome = structs.replace(outcome, dropped_share=1 - float(capped.sum() / (tokens.sum() or 1.0)))
                loads = self._changed(self._stated(capped))
            else:
                try:
                    placement = [
                        balanced_placement(tokens_of_layer, self._width, int(plan.number))
                        for tokens_of_layer in tokens.mean(axis=0)
                    ]
                except SelectionError as error:
                    return structs.replace(outcome, unknown=str(error))
                outcome = structs.replace(outcome, placement=placement)
                moved = [loads_of_ranks(tokens[:, layer], held, self._width) for layer, held in enumerate(placement)]
                loads = self._changed(np.stack(moved, axis=1))
        if not self.job.runs:
            return structs.replace(outcome, unknown="no op shows how long the experts took")
        volume = plan.number if plan.kind == "volume" else 1.0
        price = self.job.price(plan.text, loads, 1 - (outcome.dropped_share or 0.0), volume)
        return structs.replace(price, dropped_share=outcome.dropped_share, placement=outcome.placement)

    def _in_chunks(self, plan: RebalancePlan) -> Rebalanced:
        """The price of the number of chunks that is best, 1 if chunks save nothing."""
        lines = self.job.lines if self.job.runs else {}
        if not lines or not np.isfinite([lines[name].slope_error for name in ("dispatch", "combine")]).all():
            return Rebalanced(plan.text, unknown="what transfers take without rows is not known; loads must vary")
        times = {1: self.job.step_s} | {count: self.job.in_chunks(count) for count in range(2, _MOST_CHUNKS + 1)}
        best = min(times, key=lambda count: times[count])
        return Rebalanced(
            plan.text, step_time_s=times[best], saved_s=self.job.step_s - times[best], error_s=0.0, chunks=best
        )

    def _changed(self, loads: Floats) -> Floats:
        """The tokens of each member, [members], if the ranks of a group get these instead of those of the log,
        [steps, layers, ranks of a group].
        """
        assert self.by_expert is not None
        pairs, total = self.job.exchanges, self.by_expert.sum(axis=2, keepdims=True)
        share = np.divide(loads, total, out=np.zeros_like(loads), where=total > 0)
        of_pair = share[np.searchsorted(self.steps, pairs.step), pairs.layer]
        return np.asarray(pairs.total(self.job.tokens)[pairs.pair] * of_pair[pairs.pair, pairs.place])

    def experts_with(self, plans: Sequence[RebalancePlan]) -> Experts:
        """All of it. Raises FormatError for loads of another job."""
        return Experts(
            source=self.source,
            cut=self.cut,
            layers=self.layers(),
            fits=self.job.fits if self.job.runs else [],
            rebalance=[self.rebalanced(plan) for plan in plans],
            causes=[] if self.cut else self.causes(),
            notes=self.notes,
        )


def _over_mean(tokens: Floats) -> Floats:
    """The largest over the mean along the last axis; 1 where there are none."""
    mean = tokens.mean(axis=-1)
    return np.asarray(np.divide(tokens.max(axis=-1), mean, out=np.ones_like(mean), where=mean > 0))
