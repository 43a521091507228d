"""Which nodes may be drained: the one rule for every command and page that names nodes.

A slow rank is no reason to drain its node: user code, input or a neighbour on its cores slow it down just as well. A
node is to be drained only if a report that can be trusted has hardware evidence against it, such as a throttled GPU.
All other nodes of culprits are suspects: they are to be checked, and a script gets them only where it asks for them.

In: the culprits of a report. Out: nodes, and a sentence about them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from tracekit.base.hostlist import is_node_name
from tracekit.base.text import short
from tracekit.report.answer import Culprit

#: Parts of a rank that a fault of its machine can slow down; others are software or input.
MACHINE_PARTS = frozenset(("compute", "process", "network"))
#: More nodes than this are counted, not listed.
_MOST_LISTED = 4


class Nodes(NamedTuple):
    """Nodes of culprits, costliest first, with names that are safe for a script: those to `drain`, and the others."""

    drain: tuple[str, ...]
    suspects: tuple[str, ...]

    @property
    def sentence(self) -> str | None:
        """What to do with them; None if there are none."""
        if self.drain:
            return f"Drain {_listed(self.drain)}: the recording shows hardware at fault there."
        if self.suspects:
            return f"Do not drain {_listed(self.suspects)} yet: the recording shows no hardware at fault there."
        return None


class Accused(Struct, frozen=True):
    """The culprits of a job, and whether what names them can be trusted."""

    job: str
    trustworthy: bool
    trust: str
    culprits: Sequence[Culprit]


def nodes_of(culprits: Iterable[Culprit], *, trusted: bool) -> Nodes:
    """The nodes of `culprits`. `trusted`: whether the report can be."""
    drain: dict[str, None] = {}
    named: dict[str, None] = {}
    for culprit in culprits:
        host = culprit.host
        if host is not None and is_node_name(host):
            named[host] = None
            if trusted and culprit.hardware:
                drain[host] = None
    return Nodes(tuple(drain), tuple(host for host in named if host not in drain))


def _listed(nodes: tuple[str, ...]) -> str:
    return ", ".join(map(short, nodes)) if len(nodes) <= _MOST_LISTED else f"{len(nodes)} hosts"
