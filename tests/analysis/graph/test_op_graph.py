"""Op graphs: what can be stated, what is refused and why, and the graph in networkx."""

from __future__ import annotations

import polars as pl
import pytest

from tracekit.analysis.graph.op_graph import OpGraph, fold
from tracekit.base.errors import GraphError, TraceError
from tracekit.trace.facts import MissingMembers
from tracekit.trace.model import ProcessGroup

NO_EDGES = pl.DataFrame({"before": [], "after": []}, schema={"before": pl.Int64, "after": pl.Int64})


def ops(**columns: list[object]) -> pl.DataFrame:
    """Two ops, on ranks 0 and 1, with these columns instead of or besides the usual ones."""
    usual: dict[str, list[object]] = {
        "rank": [0, 1],
        "kind": ["matmul", "matmul"],
        "start": [0.0, 0.5],
        "duration": [1.0, 2.0],
    }
    return pl.DataFrame(usual | columns)


def edges(*pairs: tuple[int, int]) -> pl.DataFrame:
    return pl.DataFrame(pairs, schema={"before": pl.Int64, "after": pl.Int64}, orient="row")


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (ops().drop("rank"), "ops: column 'rank' is missing; found kind, start, duration"),
        (ops().clear(), r"ops: no ops \(0 rows\)"),
        (ops().drop("kind"), "no column says which ops are comparable; add a column 'peer', 'kind' or 'name'"),
        (ops(rank=[0, -1]), "ops: column 'rank', row 1: -1; expected an integer >= 0"),
        (ops(rank=[0.0, 1.0]), "ops: column 'rank' has type Float64; expected an integer"),
        (ops(start=[0.0, float("nan")]), "ops: column 'start', row 1: nan; expected finite seconds"),
        (ops(start=["0", "1"]), "ops: column 'start' has type String; expected seconds"),
        (ops(duration=[1.0, -1e-9]), "ops: column 'duration', row 1: -1e-09; expected finite seconds >= 0"),
        (
            ops(duration=[1.0, 1e308]),
            "ops: column 'duration', row 1: 1e.308; expected at most 100,000,000 seconds; conv",
        ),
        (ops(start=[0.0, -1.7e18]), "ops: column 'start', row 1: -1.7e.18; expected at most 4,100,000,000 seconds"),
        (ops(tp_rank=[0, -2]), "ops: label 'tp_rank', row 1: -2; expected an integer >= 0"),
        (ops(comparable=["yes", "no"]), "ops: column 'comparable' has type String, or nulls; expected true or false"),
        (ops(comparable=[True, None]), "ops: column 'comparable' has type Boolean, or nulls; expected true or false"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_place(frame: pl.DataFrame, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        OpGraph.from_frames(frame, NO_EDGES)


def test_an_identifier_is_no_label() -> None:
    many = pl.DataFrame({"rank": [0] * 100_001, "kind": "a", "start": 0.0, "duration": 0.0}).with_columns(
        correlation=pl.int_range(pl.len()).cast(pl.String)
    )
    with pytest.raises(TraceError, match="label 'correlation' has 100001 values, more than 100000"):
        OpGraph.from_frames(many, NO_EDGES)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (edges((0, 2)), "edges: column 'after', row 0: 2; the ops have rows 0 to 1"),
        (edges((-1, 1)), "edges: column 'before', row 0: -1; the ops have rows 0 to 1"),
        (
            edges((0, 1)).with_columns(pl.col("after").cast(pl.String)),
            "edges: column 'after' has type String; expected",
        ),
        (NO_EDGES.drop("after"), "edges: column 'after' is missing; found before"),
        (edges((0, 1)).with_columns(why=pl.lit("magic")), "why 'magic' is unknown; expected one of rule, stream"),
    ],
)
def test_an_edge_that_leads_nowhere_is_named(frame: pl.DataFrame, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        OpGraph.from_frames(ops(), frame)


def test_an_edge_between_steps_is_refused() -> None:
    with pytest.raises(
        GraphError, match=r"matmul of rank 1 at 0.5 s of step 1 waits for matmul of rank 0 at 0 s of st"
    ):
        OpGraph.from_frames(ops(step=[0, 1]), edges((0, 1)))


def test_a_cycle_names_its_ops() -> None:
    graph = OpGraph.from_frames(ops(), edges((0, 1), (1, 0)))
    with pytest.raises(GraphError, match="cycle: matmul of rank 0 at 0 s of step 0 and 1 more op wait for each other"):
        fold(graph)


def test_a_cycle_through_a_rendezvous_is_one() -> None:
    """Rank 0 enters collective 1, then 2; rank 1 the other way round."""
    four = pl.DataFrame(
        {
            "rank": [0, 0, 1, 1],
            "kind": "sync",
            "start": [0.0, 1.0, 0.0, 1.0],
            "duration": 1.0,
            "rendezvous": [1, 2, 2, 1],
        }
    )
    with pytest.raises(GraphError, match="cycle"):
        fold(OpGraph.from_frames(four, edges((0, 1), (2, 3))))


def test_two_ops_of_a_rank_cannot_be_one_member() -> None:
    with pytest.raises(GraphError, match=r"both claim rendezvous 7 for their rank"):
        OpGraph.from_frames(ops(rank=[1, 1], rendezvous=[7, 7]), NO_EDGES)


@pytest.mark.parametrize("kind", [pl.UInt8, pl.Int32, pl.Int64, pl.UInt64])
def test_a_rendezvous_is_an_integer_of_any_size(kind: type[pl.DataType]) -> None:
    graph = OpGraph.from_frames(ops(rendezvous=pl.Series([7, None], dtype=kind)), NO_EDGES)
    assert graph.rendezvous.tolist() == [7, -1]


def test_whole_numbers_of_rendezvous_may_be_floats() -> None:
    graph = OpGraph.from_frames(ops(rendezvous=[7.0, 7.0]), NO_EDGES)
    assert graph.rendezvous.tolist() == [7, 7]
    with pytest.raises(TraceError, match=r"ops: column 'rendezvous', row 1: 7\.5; expected integers or strings"):
        OpGraph.from_frames(ops(rendezvous=[7.0, 7.5]), NO_EDGES)


def test_numbers_of_rendezvous_that_are_hashes_only_tell_them_apart() -> None:
    for kind, numbers in ((pl.UInt64, [2**64 - 1, 2**64 - 1]), (pl.Int64, [-5, -5]), (pl.Int32, [-5, -5])):
        graph = OpGraph.from_frames(ops(rendezvous=pl.Series(numbers, dtype=kind)), NO_EDGES)
        assert graph.rendezvous.tolist() == [0, 0]


def test_a_rendezvous_lies_in_one_step() -> None:
    with pytest.raises(GraphError, match="share rendezvous 7 but are in two steps"):
        OpGraph.from_frames(ops(step=[0, 1], rendezvous=[7, 7]), NO_EDGES)


def test_a_rank_has_one_place_in_the_mesh() -> None:
    with pytest.raises(TraceError, match="rank 1 has dp_rank 0 in row 1 and 1 before; a rank has one place"):
        OpGraph.from_frames(ops(rank=[1, 1], dp_rank=[1, 0]), NO_EDGES, axes=["dp_rank"])
    with pytest.raises(TraceError, match="ops: axis 'tp' is not a column; the columns are rank, kind, start, duration"):
        OpGraph.from_frames(ops(), NO_EDGES, axes=["tp"])


class TestProcessGroups:
    OPS = ops(rendezvous=[7, 7], group=["dp", "dp"])

    def test_members_that_were_not_recorded_are_gaps(self) -> None:
        group = ProcessGroup("dp", (0, 1, 4))
        graph = OpGraph.from_frames(self.OPS, NO_EDGES, groups=[group])
        assert graph.gaps == (MissingMembers(7, "dp", (4,)),)
        assert OpGraph.from_frames(self.OPS, NO_EDGES, groups=[ProcessGroup("dp", (0, 1))]).gaps == ()

    def test_a_rank_outside_the_group_is_refused(self) -> None:
        with pytest.raises(GraphError, match=r"matmul of rank 1 .* rank 1 is not a member of group 'dp'"):
            OpGraph.from_frames(self.OPS, NO_EDGES, groups=[ProcessGroup("dp", (0, 4))])

    def test_groups_without_a_column_that_names_them_are_refused(self) -> None:
        with pytest.raises(TraceError, match="but no column 'group' names the group of each rendezvous"):
            OpGraph.from_frames(self.OPS.drop("group"), NO_EDGES, groups=[ProcessGroup("dp", (0, 1))])

    def test_a_group_that_nobody_declared_is_refused(self) -> None:
        with pytest.raises(GraphError, match="its group 'dp' is not among the groups"):
            OpGraph.from_frames(self.OPS, NO_EDGES, groups=[ProcessGroup("tp", (0, 1))])


def test_networkx_has_every_label_and_why() -> None:
    graph = OpGraph.from_frames(ops(tp_rank=[3, None]), edges((0, 1)).with_columns(why=pl.lit("event"))).to_networkx()
    assert graph.nodes[0] == {
        "kind": "matmul", "tp_rank": 3, "step": 0, "rank": 0, "start": 0.0, "duration": 1.0, "peer": "matmul",
        "rendezvous": None,
    }  # fmt: skip
    assert "tp_rank" not in graph.nodes[1]
    assert graph.edges[0, 1] == {"why": "event"}
