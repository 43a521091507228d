"""Find the dp, pp, tp and cp rank of every rank of a job.

In: the facts the ranks wrote (device meshes, Megatron's state, pipeline groups, process groups) and options. Out: a
`Placement`, with the source of the places. Sources in order of precedence: options, named device meshes, Megatron,
pipeline stages with the groups that reduced gradients. If ranks disagree, the error names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tracekit.base.errors import LayoutError
from tracekit.base.text import ranks_text
from tracekit.trace.model import Layout

#: Name of a mesh dimension -> dimension of the layout.
DIMENSION_WORDS = {
    "dp": "dp",
    "data": "dp",
    "data_parallel": "dp",
    "ddp": "dp",
    "replicate": "dp",
    "shard": "dp",
    "fsdp": "dp",
    "hsdp": "dp",
    "dp_replicate": "dp",
    "dp_shard": "dp",
    "dp_shard_cp": "dp",
    "pp": "pp",
    "pipeline": "pp",
    "pipe": "pp",
    "stage": "pp",
    "tp": "tp",
    "tensor": "tp",
    "model": "tp",
    "mp": "tp",
    "cp": "cp",
    "context": "cp",
    "sp": "cp",
}
WORDS = ("dp", "pp", "tp", "cp")
#: Advice for jobs whose layout the ranks do not reveal.
STATE_THEM = "state the sizes with --dp, --pp and --tp, or for kept segments with `tracekit import --layout`"


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """The position of one rank in the layout."""

    dp: int = 0
    pp: int = 0
    tp: int = 0
    cp: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of every rank, the sizes of the layout, and `source`: how the places were found."""

    layout: Layout
    places: Mapping[int, MeshPlace]
    source: str


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Facts of one rank. `reduced`: the ranks of each group over which it reduced gradients, most used first."""

    rank: int
    world_size: int
    meshes: tuple[Mapping[str, Any], ...] = ()
    megatron: Mapping[str, Any] | None = None
    pipelines: tuple[Mapping[str, Any], ...] = ()
    reduced: tuple[Sequence[int], ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """Sizes that the user states; those that are None are inferred."""

    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    vpp: int | None = None


@dataclass(slots=True)
class _Arrangement:
    """Places under construction."""

    places: dict[int, MeshPlace]
    source: str
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _NamedMesh:
    """A device mesh: the names and sizes of its dimensions, and its ranks, row-major."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    members: tuple[int, ...]

    @classmethod
    def of(cls, fact: Mapping[str, Any]) -> _NamedMesh:
        """The mesh that a rank wrote."""
        ranks = np.array(fact["ranks"])
        return cls(tuple(fact["names"] or ()), ranks.shape, tuple(ranks.ravel().tolist()))

    def places_all(self, world_size: int) -> bool:
        """True if the mesh contains all ranks and all its dimensions have known names."""
        all_named = len(self.names) == len(self.shape) and all(name in DIMENSION_WORDS for name in self.names)
        return all_named and bool(self.names) and len(self.members) == world_size

    @property
    def shown(self) -> str:
        """The dimensions as text for a message."""
        return " x ".join(f"{name} {size}" for name, size in zip(self.names, self.shape, strict=True))


def place_ranks(facts: Iterable[RankFacts], options: LayoutOptions | None = None) -> Placement:
    """Find the layout of a job from what its ranks wrote. Raises LayoutError if they contradict each other."""
    ranks = sorted(facts, key=lambda facts: facts.rank)
    world_size = ranks[0].world_size  # who saw another one was left out when the attempt was read
    _check_loops(ranks)
    chosen = options or LayoutOptions()
    placed = _from_options(ranks, world_size, chosen) or _from_job(ranks, world_size)
    sizes = placed.sizes or _largest(placed.places)
    _check_distinct(placed, sizes, world_size)
    vpp = chosen.vpp or _chunks(ranks, sizes["pp"])
    layout = Layout(**sizes, vpp=vpp, world_size=world_size)
    return Placement(layout, {facts.rank: placed.places[facts.rank] for facts in ranks}, placed.source)


def _check_loops(ranks: list[RankFacts]) -> None:
    """Raise LayoutError for a V-shaped pipeline, such as those of ZBV and DualPipeV.

    A rank has two links in the same direction, whose transfers do not wait for each other as the merge assumes, and
    DualPipeV's overlapping computes are not recorded.
    """
    for rank in ranks:
        stages = sorted({int(pipeline["stage_index"]) for pipeline in rank.pipelines if "stage_index" in pipeline})
        size = len(rank.pipelines[0]["ranks"]) if rank.pipelines else 1
        if len({stage % size for stage in stages}) > 1:
            raise LayoutError(
                f"rank {rank.rank} has the pipeline stages {', '.join(map(str, stages))}: V-shaped schedules are not"
                " supported; use an interleaved one to get a trace"
            )


def _from_options(ranks: list[RankFacts], world_size: int, options: LayoutOptions) -> _Arrangement | None:
    """Places by arithmetic, tp fastest, then dp, then pp, as Megatron orders ranks; None without options."""
    if options.dp is None and options.pp is None and options.tp is None:
        return None
    base = None
    with suppress(LayoutError):  # facts that conflict or are missing are what the options are for
        base = _from_job(ranks, world_size)
    stated = {word: getattr(options, word) for word in ("dp", "pp", "tp") if getattr(options, word) is not None}
    sizes_of_base = (base.sizes or _largest(base.places)) if base is not None else {}
    if base is not None and all(sizes_of_base[word] == size for word, size in stated.items()):
        return replace(base, source=f"{base.source}, confirmed by options")
    pp, tp = stated.get("pp", 1), stated.get("tp", 1)
    dp = stated.get("dp") or world_size // (pp * tp)
    if dp * pp * tp != world_size:
        raise LayoutError(
            f"dp {dp} x pp {pp} x tp {tp} = {dp * pp * tp}, but the job has {world_size} ranks; correct the"
            " sizes, for kept segments with `tracekit import --layout`"
        )
    places = {rank: MeshPlace(dp=rank // tp % dp, pp=rank // (tp * dp), tp=rank % tp) for rank in range(world_size)}
    return _Arrangement(places, "options (tp fastest, then dp, then pp)", {"dp": dp, "pp": pp, "tp": tp, "cp": 1})


def _from_job(ranks: list[RankFacts], world_size: int) -> _Arrangement:
    """Places from the facts of the job. Raises LayoutError if they conflict or are missing."""
    return _from_meshes(ranks, world_size) or _from_megatron(ranks, world_size) or _from_groups(ranks, world_size)


def _largest(places: Mapping[int, MeshPlace]) -> dict[str, int]:
    """Sizes of the layout, from the highest rank in each dimension."""
    return {word: 1 + max(getattr(place, word) for place in places.values()) for word in WORDS}


def _from_meshes(ranks: list[RankFacts], world_size: int) -> _Arrangement | None:
    """Places from the device mesh that contains all ranks and whose dimensions all have known names."""
    # By identity, too: ranks that wrote the same mesh share one object.
    seen: dict[int, list[int] | None] = {}
    builders: dict[_NamedMesh, list[int]] = {}
    for facts in ranks:
        for fact in facts.meshes:
            if id(fact) not in seen:
                mesh = _NamedMesh.of(fact)
                seen[id(fact)] = builders.setdefault(mesh, []) if mesh.places_all(world_size) else None
            if (members := seen[id(fact)]) is not None:
                members.append(facts.rank)
                break
    if not builders:
        return None
    usual = max(builders, key=lambda mesh: len(builders[mesh]))
    if len(builders) > 1:
        others = sorted(rank for mesh, members in builders.items() if mesh != usual for rank in members)
        raise LayoutError(
            f"{ranks_text(others)} built a device mesh other than {usual.shown}, which the rest built; start them with"
            f" the same parallel sizes, or {STATE_THEM}"
        )
    places, words = {}, [DIMENSION_WORDS[name] for name in usual.names]
    sizes = dict.fromkeys(WORDS, 1)
    for word, size in zip(words, usual.shape, strict=True):
        sizes[word] *= size
    for rank, indices in zip(usual.members, np.ndindex(usual.shape), strict=True):
        coordinate = dict.fromkeys(WORDS, 0)
        for word, size, index in zip(words, usual.shape, indices, strict=True):
            coordinate[word] = coordinate[word] * size + index
        places[rank] = MeshPlace(**coordinate)
    return _Arrangement(places, f"device mesh ({', '.join(usual.names)})", sizes)


def _from_megatron(ranks: list[RankFacts], world_size: int) -> _Arrangement | None:
    """Places from Megatron's parallel state, in which each rank has its own place."""
    knowing = [facts for facts in ranks if facts.megatron is not None]
    if not knowing:
        return None
    sizes_of = {
        rank.rank: {word: rank.megatron["sizes"].get(word, 1) for word in WORDS} for rank in knowing if rank.megatron
    }
    usual = sizes_of[knowing[0].rank]
    others = [rank for rank, sizes in sizes_of.items() if sizes != usual]
    silent = [facts.rank for facts in ranks if facts.megatron is None]
    if others or silent:
        raise LayoutError(
            f"Megatron's parallel sizes are {usual} on rank {knowing[0].rank}, but {'others' if others else 'unknown'}"
            f" on {ranks_text(others or silent)}; {STATE_THEM}"
        )
    places = {
        facts.rank: MeshPlace(**{word: facts.megatron["ranks"].get(word, 0) for word in WORDS})
        for facts in knowing
        if facts.megatron
    }
    if usual["dp"] * usual["pp"] * usual["tp"] * usual["cp"] != world_size and usual["cp"] > 1:
        usual = {**usual, "cp": 1}  # Megatron's data-parallel size can include the context-parallel one
        places = {rank: replace(place, cp=0) for rank, place in places.items()}
    return _Arrangement(places, "Megatron parallel state", usual)


def _from_groups(ranks: list[RankFacts], world_size: int) -> _Arrangement:
    """Places from pipeline stages and the groups that reduced gradients."""
    places = {}
    found_pipeline = found_reduction = False
    for rank in ranks:
        pp = dp = 0
        if rank.pipelines:
            pp, found_pipeline = int(rank.pipelines[0]["group_rank"]), True
        if rank.reduced:
            dp, found_reduction = sorted(rank.reduced[0]).index(rank.rank), True
        places[rank.rank] = MeshPlace(dp=dp, pp=pp)
    if world_size > 1 and not found_pipeline and not found_reduction:
        raise LayoutError(
            f"the layout of {world_size} ranks cannot be found: no device mesh, Megatron, pipeline or gradient"
            f" reduction was seen; {STATE_THEM}"
        )
    if found_pipeline and not found_reduction:
        _spread_replicas(ranks, places)
    how = [name for name, seen in (("pipeline stages", found_pipeline), ("gradient groups", found_reduction)) if seen]
    sizes = _group_sizes(ranks) if len(places) < world_size else {}
    return _Arrangement(places, " and ".join(how) or "a single rank", sizes)


def _spread_replicas(ranks: list[RankFacts], places: dict[int, MeshPlace]) -> None:
    """Give each pipeline its own dp rank, in order of first ranks, if no gradient group shows which is which."""
    pipelines = sorted({tuple(facts.pipelines[0]["ranks"]) for facts in ranks if facts.pipelines})
    for rank in ranks:
        if rank.pipelines:
            number = pipelines.index(tuple(rank.pipelines[0]["ranks"]))
            places[rank.rank] = replace(places[rank.rank], dp=number)


def _group_sizes(ranks: list[RankFacts]) -> dict[str, int]:
    """Sizes from the groups themselves, for jobs with missing ranks."""
    pp = max((len(facts.pipelines[0]["ranks"]) for facts in ranks if facts.pipelines), default=1)
    dp = max((len(facts.reduced[0]) for facts in ranks if facts.reduced), default=1)
    return {"dp": dp, "pp": pp, "tp": 1, "cp": 1}


def _check_distinct(placed: _Arrangement, sizes: Mapping[str, int], world_size: int) -> None:
    """Raise LayoutError unless every rank has its own place and there are as many places as ranks."""
    rank_at: dict[MeshPlace, int] = {}
    for rank, place in sorted(placed.places.items()):
        if place in rank_at:
            raise LayoutError(
                f"ranks {rank_at[place]} and {rank} are both placed at dp {place.dp}, pp {place.pp}, tp {place.tp}, cp"
                f" {place.cp} by {placed.source}; {STATE_THEM}"
            )
        rank_at[place] = rank
    product = sizes["dp"] * sizes["pp"] * sizes["tp"] * sizes["cp"]
    if product != world_size:
        raise LayoutError(
            f"{placed.source} gives dp {sizes['dp']} x pp {sizes['pp']} x tp {sizes['tp']} x cp {sizes['cp']} ="
            f" {product}, but the job has {world_size} ranks; {STATE_THEM}"
        )


def _chunks(ranks: list[RankFacts], pp: int) -> int:
    """Model chunks per rank: pipeline stages divided by pipeline ranks."""
    counts = [int(facts.pipelines[0]["num_stages"]) for facts in ranks if facts.pipelines]
    megatron = [int(facts.megatron["vpp"]) for facts in ranks if facts.megatron is not None]
    if counts:
        return max(1, max(counts) // pp)
    return max(megatron, default=1)
