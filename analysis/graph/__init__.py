"""A trace as a dependency graph: lanes, the rules that connect their ops, templates, and views by stage and worker.

`Posting` is here because it names the rules without importing what follows them.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from tracekit.base.limits import Count, Proportion


class Posting(StrEnum):
    """Bounds of the start of a receive, from the loosest rule to the tightest.

    EARLY: the previous receive. SAME_DIRECTION: the previous compute of its direction (published method).
    ANY_DIRECTION: the previous compute. BATCHED: the previous compute and all sends and receives before it. Transfers
    posted together are one call; the next compute, and host work recorded after the call, waits for the whole call.
    RECORDED: the host's work before its request, as recorded (`posting.with_host_order`).
    """

    EARLY = "early"
    SAME_DIRECTION = "same-direction"
    ANY_DIRECTION = "any-direction"
    BATCHED = "batched"
    RECORDED = "recorded"


class PostingRule(Struct, frozen=True):
    """The rule by which a job posts receives."""

    #: what bounds the start of a receive: `early` (the receive before), `same-direction` (the previous compute of its
    #: direction, as published), `any-direction` (the previous compute), `batched` (the previous compute and all
    #: transfers before it; the next compute waits for the batch), `recorded` (whatever the host did before, as the
    #: trace says)
    rule: Posting
    obeyed: Proportion  #: share of the ops that tell which obey the rule
    telling: Count  #: how many ops tell; 0: too few, so the published rule stands, or none needed (`recorded`)
