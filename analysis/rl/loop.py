"""The loop of generation, reward, training and weight sync, replayed.

In: the durations of each step. Out: when each step's sync ends. Generation j begins once generation j-1 and the sync of
step j-1-k have ended, where k is the staleness; training j begins once reward j and sync j-1 have.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import Struct

from tracekit.analysis.numeric.arrays import Floats

#: Steps at the beginning that are no part of a mean: a run starts with empty pipelines.
WARM_UP = 2


class Loop(Struct, frozen=True, eq=False):
    """A run. All arrays are [steps], in seconds.

    `generate_late`, `train_late`: what generation and training start later than the rule says; replays keep it.
    `reward`: from the end of the generation to that of the reward; `train`: from the start of the training to that of
    the sync.
    """

    generate: Floats
    reward: Floats
    train: Floats
    sync: Floats
    generate_late: Floats
    train_late: Floats
    staleness: int

    def replace(self, **changed: Floats | int) -> Loop:
        """The same loop with some durations changed."""
        return msgspec.structs.replace(self, **changed)

    def step_times(self) -> Floats:
        """The replayed steps after the warm-up, from the end of a sync to that of the next."""
        return np.diff(self.sync_ends())[WARM_UP - 1 :]

    def sync_ends(self) -> Floats:
        """When each sync ends, from the start of the first generation."""
        synced: list[float] = []
        generated = last_sync = 0.0
        columns = (self.generate, self.reward, self.train, self.sync, self.generate_late, self.train_late)
        for number, (generate, reward, train, sync, generate_late, train_late) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            weights = synced[number - 1 - self.staleness] if number > self.staleness else 0.0
            generated = max(generated, weights) + generate_late + generate
            last_sync = max(generated + reward, last_sync) + train_late + train + sync
            synced.append(last_sync)
        return np.array(synced)
