"""Where ranks stand: from meshes, Megatron, groups and options; contradictions are errors that name ranks."""

import pytest

from tracekit.base.errors import LayoutError
from tracekit.collectors.merge.placement import LayoutOptions, MeshPlace, RankFacts, place_ranks


def with_mesh(names, ranks, world_size, only=None):
    """One fact per rank, all with the same mesh."""
    mesh = {"names": names, "ranks": ranks}
    return [RankFacts(rank, world_size, meshes=(mesh,)) for rank in only or range(world_size)]


def test_named_mesh():
    """Dimension names say what they are, in any order."""
    found = place_ranks(with_mesh(["pp", "dp", "tp"], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], 8))
    assert (found.layout.dp, found.layout.pp, found.layout.tp) == (2, 2, 2)
    assert found.places[6] == MeshPlace(dp=1, pp=1, tp=0)
    assert found.source == "device mesh (pp, dp, tp)"


def test_replicated_and_sharded_dimensions_are_one_data_parallel_one():
    """dp_replicate x dp_shard count together, in mesh order."""
    found = place_ranks(with_mesh(["dp_replicate", "dp_shard"], [[0, 1], [2, 3]], 4))
    assert found.layout.dp == 4
    assert [found.places[rank].dp for rank in range(4)] == [0, 1, 2, 3]


def test_missing_ranks_do_not_change_the_sizes():
    """Sizes come from the mesh, not from who reported."""
    found = place_ranks(with_mesh(["dp", "pp"], [[0, 1], [2, 3]], 4, only=[0, 1, 2]))
    assert (found.layout.dp, found.layout.pp, found.layout.world_size) == (2, 2, 4)
    assert set(found.places) == {0, 1, 2}


def test_pipelines_and_reduction_groups():
    """Without a mesh: the stage from the pipeline's group, the replica from the group that reduced gradients."""
    facts = [
        RankFacts(
            rank,
            4,
            pipelines=({"group_rank": rank % 2, "num_stages": 4, "ranks": [rank - rank % 2, rank - rank % 2 + 1]},),
            reduced=((rank % 2, rank % 2 + 2),),
        )
        for rank in range(4)
    ]
    found = place_ranks(facts)
    assert (found.layout.dp, found.layout.pp, found.layout.vpp) == (2, 2, 2)
    assert found.places[3] == MeshPlace(dp=1, pp=1)


def test_groups_say_the_sizes_of_a_job_whose_ranks_are_missing():
    """Ranks 0 to 2 of two pipelines of two stages: of places alone, nobody knows how many there are."""
    facts = [
        RankFacts(
            rank, 4, pipelines=({"group_rank": rank // 2, "num_stages": 2, "ranks": [rank % 2, rank % 2 + 2]},),
            reduced=((rank - rank % 2, rank - rank % 2 + 1),),
        )
        for rank in (0, 2)
    ]  # fmt: skip
    found = place_ranks(facts)
    assert (found.layout.dp, found.layout.pp, found.layout.world_size) == (2, 2, 4)
    assert found.places == {0: MeshPlace(), 2: MeshPlace(pp=1)}


def test_a_job_of_gradient_groups_alone_has_one_stage_though_a_rank_is_missing():
    facts = [RankFacts(rank, 4, reduced=((0, 1, 2, 3),)) for rank in (0, 1, 3)]
    found = place_ranks(facts)
    assert (found.layout.dp, found.layout.pp) == (4, 1)
    assert found.places[3] == MeshPlace(dp=3)


def test_a_pipeline_that_turns_around_is_refused():
    """Interleaved, rank 0 has the stages 0 and 2 of 4; V-shaped, 0 and 3."""

    def facts(first, second):
        known = {"num_stages": 4, "ranks": [0, 1]}
        return [
            RankFacts(rank, 2, pipelines=tuple(known | {"group_rank": rank, "stage_index": at} for at in stages))
            for rank, stages in enumerate((first, second))
        ]

    assert place_ranks(facts((0, 2), (1, 3))).layout.vpp == 2
    with pytest.raises(LayoutError, match="rank 0 has the pipeline stages 0, 3: V-shaped schedules are not supported"):
        place_ranks(facts((0, 3), (1, 2)))


def test_megatron_knows():
    """Each rank's own words about itself."""
    sizes = {"dp": 2, "pp": 2, "tp": 1, "cp": 1, "ep": 1}
    facts = [
        RankFacts(rank, 4, megatron={"ranks": {"dp": rank % 2, "pp": rank // 2}, "sizes": sizes, "vpp": 2})
        for rank in range(4)
    ]
    found = place_ranks(facts)
    assert found.places[2] == MeshPlace(dp=0, pp=1)
    assert found.layout.vpp == 2


def megatron(rank, world_size, sizes, **place):
    return RankFacts(rank, world_size, megatron={"ranks": place, "sizes": sizes, "vpp": 1})


def test_the_data_parallel_size_of_megatron_may_hold_the_context_parallel_one():
    facts = [megatron(rank, 4, {"dp": 4, "cp": 2}, dp=rank, cp=rank % 2) for rank in range(4)]
    found = place_ranks(facts)
    assert (found.layout.dp, found.layout.cp) == (4, 1)
    assert found.places[3] == MeshPlace(dp=3)


def test_ranks_of_megatron_that_disagree_are_named():
    sizes = {"dp": 2, "pp": 2}
    alike = [megatron(rank, 4, sizes, dp=rank % 2, pp=rank // 2) for rank in range(3)]
    for last, words in (
        (megatron(3, 4, {"dp": 4}, dp=3), "but others on rank 3;"),
        (RankFacts(3, 4), "but unknown on rank 3;"),
    ):
        with pytest.raises(LayoutError, match=words):
            place_ranks([*alike, last])
    few = [megatron(rank, 4, {"dp": 2}, dp=rank) for rank in range(2)]
    with pytest.raises(LayoutError, match="gives dp 2 x pp 1 x tp 1 x cp 1 = 2, but the job has 4 ranks"):
        place_ranks(few)


def test_options_that_agree_with_the_mesh_leave_it_its_order():
    found = place_ranks(with_mesh(["dp", "pp"], [[0, 1], [2, 3]], 4), LayoutOptions(dp=2))
    assert found.source == "device mesh (dp, pp), confirmed by options"
    assert found.places[1] == MeshPlace(dp=0, pp=1)


def test_options_win():
    """Stated sizes place ranks by arithmetic."""
    found = place_ranks([RankFacts(rank, 8) for rank in range(8)], LayoutOptions(dp=2, pp=2, tp=2))
    assert found.places[7] == MeshPlace(dp=1, pp=1, tp=1)
    with pytest.raises(LayoutError, match="dp 3 x pp 2 x tp 1 = 6, but the job has 8 ranks"):
        place_ranks([RankFacts(rank, 8) for rank in range(8)], LayoutOptions(dp=3, pp=2))


def test_one_rank():
    """A single process needs nothing."""
    assert place_ranks([RankFacts(0, 1)]).layout.workers == 1


def test_contradictions_name_the_ranks():
    """Other meshes, two ranks at one place, nothing to go by."""
    good = with_mesh(["dp", "pp"], [[0, 1], [2, 3]], 4)
    other = RankFacts(3, 4, meshes=({"names": ["pp", "dp"], "ranks": [[0, 1], [2, 3]]},))
    with pytest.raises(LayoutError, match="rank 3 built a device mesh other than"):
        place_ranks([*good[:3], other])
    with pytest.raises(LayoutError, match="ranks 0 and 1 are both placed at dp 0"):
        place_ranks(
            [RankFacts(rank, 2, pipelines=({"group_rank": 0, "num_stages": 1, "ranks": [0]},)) for rank in (0, 1)]
        )
    with pytest.raises(LayoutError, match="state the sizes with --dp, --pp and --tp, or for kept"):
        place_ranks([RankFacts(rank, 4) for rank in range(4)])
