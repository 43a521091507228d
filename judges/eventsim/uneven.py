"""Causes in a job's data. See `causes`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from judges.eventsim.causes import Cause, Floats
from judges.eventsim.world import World


@dataclass(frozen=True, slots=True)
class SkewedData(Cause):
    """One DP rank gets sequences `factor` times as long as the others; the number of tokens stays the same."""

    dp: int
    factor: float = 2.0

    def apply(self, world: World) -> None:
        for field, factor in ((world.tokens, self.factor), (world.attention, self.factor**2)):
            field[:, self.dp] *= factor
            field[...] /= 1 + (factor - 1) / world.job.shape.dp


class Lengths(StrEnum):
    """Distribution of document lengths."""

    LOGNORMAL = "lognormal"
    PARETO = "pareto"
    BIMODAL = "bimodal"

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...], sigma: float) -> Floats:
        """Draw lengths of documents; `sigma`: of their logarithm if it is lognormal."""
        match self:
            case Lengths.PARETO:
                return np.asarray(np.minimum(0.3 + 0.3 * rng.pareto(1.3, shape), 40.0))
            case Lengths.BIMODAL:
                return np.where(rng.random(shape) < 0.2, 6.0, 0.5) * rng.uniform(0.8, 1.2, shape)
            case _:
                return rng.lognormal(0, sigma, shape)


@dataclass(frozen=True, slots=True)
class UnequalSequences(Cause):
    """Microbatches of documents with a long-tailed length.

    `packed`: each is filled to the same tokens, attention differs; else it holds `documents`, and both differ.
    `shards`: for so many steps, one DP rank gets the costliest microbatches, another the next; 0: random.
    """

    seed: int
    packed: bool = True
    sigma: float = 1.4
    documents: int = 8
    lengths: Lengths = Lengths.LOGNORMAL
    shards: int = 0

    def apply(self, world: World) -> None:
        rng = np.random.default_rng(self.seed)
        shape = world.tokens.shape
        if self.packed:
            lengths = np.minimum(self.lengths.draw(rng, (*shape, 400), self.sigma), 40.0)
            before = np.cumsum(lengths, axis=-1) - lengths
            lengths = np.clip(40.0 - before, 0.0, lengths)  # the last document is cut at the budget
            tokens = np.ones(shape)
        else:
            lengths = self.lengths.draw(rng, (*shape, self.documents), self.sigma)
            tokens = lengths.sum(axis=-1) / lengths.sum(axis=-1).mean()
        attention = (lengths**2).sum(axis=-1)
        if self.shards:
            tokens, attention = self._sharded(rng, tokens, attention)
        world.tokens *= tokens
        world.attention *= attention / attention.mean()

    def _sharded(self, rng: np.random.Generator, tokens: Floats, attention: Floats) -> tuple[Floats, Floats]:
        """The microbatches [S, D, M] of each stretch of steps, sorted over DP ranks in a drawn order."""
        steps, dp, microbatches = tokens.shape
        for first in range(0, steps, self.shards):
            stretch, ranks = slice(first, first + self.shards), rng.permutation(dp)
            order = np.argsort(attention[stretch].ravel()).reshape(dp, -1)[ranks]
            order = rng.permuted(order, axis=1).reshape(dp, -1, microbatches).transpose(1, 0, 2)
            tokens[stretch], attention[stretch] = tokens[stretch].ravel()[order], attention[stretch].ravel()[order]
        return tokens, attention
