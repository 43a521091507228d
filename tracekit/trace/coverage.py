"""How much of a job a trace covers: its workers, and each of them in each step; the members of its collectives.

In: the layout, and the workers that were traced. Out: `TraceCoverage`; of any graph of ops, `MissingMembers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracekit.trace.model import Layout, Worker

#: Name at most this many workers that were not traced.
MOST_MISSING = 1000


@dataclass(frozen=True, slots=True)
class TraceCoverage:
    """How much of the job the trace covers. A worker-step is one worker in one step.

    `missing_workers`: those without any op, the first `MOST_MISSING` of them.
    """

    workers_expected: int
    workers_traced: int
    worker_steps_expected: int
    worker_steps_traced: int
    missing_workers: tuple[Worker, ...]

    @classmethod
    def of(
        cls, layout: Layout, dp_rank: np.ndarray, pp_rank: np.ndarray, steps: int, worker_steps: int
    ) -> TraceCoverage:
        """`dp_rank`, `pp_rank`: of the traced workers, repeated or not, in any order. `worker_steps`: those traced."""
        workers = traced_dp_ranks(layout, dp_rank) * layout.pp
        traced = np.zeros((max(workers // layout.pp, int(dp_rank.max()) + 1), layout.pp), dtype=bool)
        traced[dp_rank, pp_rank] = True
        missing = np.flatnonzero(~traced.ravel()[:workers])[:MOST_MISSING]
        return cls(
            workers_expected=workers,
            workers_traced=int(traced.sum()),
            worker_steps_expected=steps * workers,
            worker_steps_traced=worker_steps,
            missing_workers=tuple(Worker(*divmod(cell, layout.pp)) for cell in missing.tolist()),
        )

    @property
    def complete(self) -> bool:
        """True if every worker of the layout is in every traced step."""
        return self.worker_steps_traced == self.worker_steps_expected


@dataclass(frozen=True, slots=True)
class MissingMembers:
    """A rendezvous with missing members: its name, and the ranks that were not recorded."""

    rendezvous: int
    group: str
    missing: tuple[int, ...]


def traced_dp_ranks(layout: Layout, dp_rank: np.ndarray) -> int:
    """The number of dp_rank values in a complete trace: with dsp > 1 some recorders number dp only, some dp x dsp."""
    return layout.dp if int(dp_rank.max()) < layout.dp else layout.dp_ranks
