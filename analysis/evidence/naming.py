"""Names of places in a job: ranks and nodes rather than coordinates.

In: a `Place`, and which rank on which host is which worker. Out: a noun phrase, such as "rank 9 on host-0001".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec import Struct

from tracekit.base.text import runs, short
from tracekit.report.finding import Link, Place
from tracekit.trace.model import Worker

#: Lists with more names than this give their number instead.
_MOST_NAMED = 4
#: Begins the name of a worker whose ranks cannot be told apart.
OF_RANKS = "the worker of "


class Phrase(Struct, frozen=True):
    """A place in words. `plural`: whether its verb is in the plural."""

    words: str
    plural: bool

    def verb(self, singular: str, plural: str) -> str:
        """The form of a verb that agrees with the place."""
        return plural if self.plural else singular


class Names(Struct, frozen=True):
    """`ranks`: the recorded rank of each worker; `hosts`: its host, as far as known; `stages`: pipeline stages.

    `host_of_rank`: the host of each rank, as far as known. `alike`: the number of ranks of a worker, from the recorded
    one on, that the recording cannot distinguish.
    """

    ranks: Mapping[Worker, int] = {}
    hosts: Mapping[Worker, str] = {}
    stages: int = 1
    host_of_rank: Mapping[int, str] = {}
    alike: int = 1

    def place(self, where: Place) -> Phrase | None:
        """The name of `where`; None for the whole job."""
        if where.workers:
            return self._workers(where.workers)
        if where.ranks:
            return _on_hosts(_several("rank", where.ranks), {self.host_of_rank.get(rank, "") for rank in where.ranks})
        if where.links:
            return self._links(where.links)
        if where.pp_ranks:
            stages = _several("stage", where.pp_ranks)
            return Phrase(f"model chunk {listed(where.chunks)} of {stages.words}", False) if where.chunks else stages
        if where.dp_ranks and self.stages == 1:
            return self._workers([Worker(dp_rank, 0) for dp_rank in where.dp_ranks])
        return _several("DP rank", where.dp_ranks) if where.dp_ranks else None

    def _workers(self, workers: Sequence[Worker]) -> Phrase:
        if any(worker not in self.ranks for worker in workers):  # not recorded
            return _several("worker", [worker.coordinates for worker in workers])
        hosts = {self.hosts.get(worker, "") for worker in workers}
        recorded = [self.ranks[worker] for worker in workers]
        if self.alike == 1 or any(rank % self.alike for rank in recorded):
            return _on_hosts(_several("rank", recorded), hosts)
        ranks = _several("rank", [rank + more for rank in recorded for more in range(self.alike)])
        if len(workers) == 1:  # one worker computes, costs and waits in the singular
            ranks = Phrase(OF_RANKS + ranks.words, False)
        return _on_hosts(ranks, hosts)

    def _links(self, links: Sequence[Link]) -> Phrase:
        first = links[0]
        ends = first.ends
        hosts = [f" on {short(host)}" if (host := self.hosts.get(end)) else "" for end in ends]
        names = [f"rank {self.ranks[end]}" if end in self.ranks else end.coordinates for end in ends]
        within = hosts[0] == hosts[1]
        link = f"link between {names[0]}{'' if within else hosts[0]} and {names[1]}{hosts[1]}"
        return (
            Phrase(f"the {link}", False) if len(links) == 1 else Phrase(f"{len(links)} links, first the {link}", True)
        )


def _on_hosts(ranks: Phrase, hosts: Set[str]) -> Phrase:
    """Ranks and the hosts they are on, if all hosts are known and there are few."""
    if "" in hosts or len(hosts) > _MOST_NAMED:
        return ranks
    return Phrase(f"{ranks.words} on {listed(map(short, sorted(hosts)))}", ranks.plural)


def listed(items: Iterable[object]) -> str:
    """Items as a list in a sentence."""
    shown = [str(item) for item in items]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _several(noun: str, numbers: Sequence[object]) -> Phrase:
    """One or more things of a kind; neighbours as ranges."""
    if len(numbers) == 1:
        return Phrase(f"{noun} {numbers[0]}", False)
    named = [
        f"{first}" if first == last else f"{first}-{last}"
        for first, last in runs(number for number in numbers if isinstance(number, int))
    ] or [str(number) for number in numbers]
    if len(named) > _MOST_NAMED:
        return Phrase(f"{len(numbers)} {noun}s ({', '.join(named[:_MOST_NAMED])}, ...)", True)
    return Phrase(f"{noun}s {listed(named)}", True)
