"""What to do about a cause, and what to check: a command to run, a setting to change, a person to ask.

In: the advice of a detector, with names to fill in, and the place of a cause. Out: the remedy for that place.

Names in braces that a remedy can contain: `ranks` ("rank 9"), `it` (the pronoun for them), `hosts` ("host-0001", or
"its node" if none is known), `ends` (the two ends of a link), `place` (ranks, stage or link with their hosts).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from tracekit.analysis.evidence.naming import OF_RANKS, Names, listed
from tracekit.base.text import short
from tracekit.report.finding import Place


class Advice(Struct, frozen=True):
    """What to do, or to check, in a job on GPUs, and in one without any."""

    gpu: str
    cpu: str


def advice_text(advice: str | Advice, *, on_cpus: bool = False) -> str:
    """Return advice as text. `on_cpus`: no GPU takes part in the job."""
    if isinstance(advice, str):
        return advice
    return advice.cpu if on_cpus else advice.gpu


#: Slow compared with its peers, for no visible reason.
SLOW_RANK = Advice(
    gpu="check {ranks} on {hosts} for throttled GPUs (nvidia-smi -q -d PERFORMANCE): if throttled, swap the node for a"
    " spare; if not, profile {it} and a peer (torch.profiler, py-spy)",
    cpu="check the cores of {ranks} on {hosts} for other processes and lowered clocks (top, /proc/pressure/cpu,"
    " turbostat); if there are none, profile {it} and a peer (py-spy)",
)
#: Slow in forwards only, or in backwards only: a slow machine would be slow in both.
SLOW_KIND = (
    "profile {ranks} and a peer (torch.profiler, py-spy record) and take out what runs only there: hooks, user"
    " code, other input"
)
#: A GPU is known to be throttled.
THROTTLED_RANK = "swap {hosts} for a spare, because the GPUs of {ranks} are throttled; have power and cooling checked"
THROTTLED_HOST = "drain {hosts}, because its GPUs are throttled; have power and cooling checked"
#: GPUs were sampled: they are not what differs.
SAME_CLOCK = (
    "profile {ranks} on {hosts} and a peer (torch.profiler, py-spy): GPUs ran at the clock of the others, so look"
    " for more work, other input or user code"
)
SAME_CARD = (
    "profile {ranks} on {hosts} and a peer (torch.profiler, py-spy): both compute on one GPU, so look for more work,"
    " other input or user code"
)
LOW_CLOCK = (
    "raise the GPU clocks of {ranks} on {hosts}, which are lower than those of others (nvidia-smi -q -d CLOCK,POWER:"
    " application clocks, locked clocks, power limit)"
)
#: More hosts than this are counted, not listed.
_MOST_HOSTS = 4


def remedy_for(advice: str | Advice, names: Names, where: Place, *, on_cpus: bool = False) -> str:
    """The advice with the names of a place filled in. `on_cpus`: no GPU takes part in the job."""
    text = advice_text(advice, on_cpus=on_cpus)
    if "{" not in text:
        return text
    place, ranks = names.place(where), replace(names, hosts={}, host_of_rank={}).place(where)
    words = "all ranks" if ranks is None else ranks.words.removeprefix(OF_RANKS)
    several = ranks is None or ranks.plural or ranks.words != words
    return text.format(
        place="all ranks" if place is None else place.words,
        ranks=words,
        it="them" if several else "it",
        hosts=_hosts(names, where),
        ends=_ends(names, where),
    )


def _hosts(names: Names, where: Place) -> str:
    """The hosts of a place, as far as all are known."""
    if where == Place(steps=where.steps):
        return "the hosts"
    workers = [*where.workers, *(end for link in where.links for end in link.ends)]
    workers += [
        worker for worker in names.ranks if worker.dp_rank in where.dp_ranks or worker.pp_rank in where.pp_ranks
    ]
    hosts = {names.hosts.get(worker, "") for worker in workers}
    hosts |= {names.host_of_rank.get(rank, "") for rank in where.ranks}
    if where.host is not None:
        hosts = {where.host}
    if "" in hosts or not hosts:
        return "its node" if len(workers) + len(where.ranks) == 1 else "their nodes"
    return listed(map(short, sorted(hosts))) if len(hosts) <= _MOST_HOSTS else f"the {len(hosts)} hosts"


def _ends(names: Names, where: Place) -> str:
    """The nodes that a link joins; its ranks if the nodes are unknown or the same."""
    ends = [end for link in where.links[:1] for end in link.ends]
    hosts = [names.hosts.get(end, "") for end in ends]
    if all(hosts) and len(set(hosts)) > 1:
        return listed(map(short, hosts))
    return listed(f"rank {names.ranks[end]}" if end in names.ranks else end.coordinates for end in ends)
