"""Which rules the analysis follows: tracekit's own, or exactly those of the published method."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """How costs are measured.

    `tracekit`: clock offsets are removed before anything is measured, members of collectives that were not recorded are
    reconstructed, and what only some workers or steps do (garbage collection, checkpoints, ...) is compared with the
    workers and steps that do not do it. `published`: the rules of "Understanding Stragglers in Large Model Training"
    (OSDI'25) and nothing else; reproduces its numbers.
    """

    TRACEKIT = "tracekit"
    PUBLISHED = "published"
