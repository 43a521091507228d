"""Components and what can be reached, by hand and as in networkx."""

import networkx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tracekit.analysis.numeric.arrays import adjacency, reachable, strong_components

NODES = 12
EDGES = st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)), max_size=40)


def test_a_ring_is_one_component_and_what_hangs_on_it_is_another() -> None:
    """0 -> 1 -> 2 -> 0, 2 -> 3, and 4 by itself."""
    sources, targets = np.array([0, 1, 2, 2]), np.array([1, 2, 0, 3])
    component = strong_components(sources, targets, 5).tolist()
    assert component[0] == component[1] == component[2]
    assert len({component[0], component[3], component[4]}) == 3
    assert max(component) == 2
    edges = adjacency(sources, targets, 5)
    assert [reachable(*edges, node).tolist() for node in (1, 3, 4)] == [[0, 1, 2, 3], [3], [4]]


def test_a_chain_of_any_length_is_followed() -> None:
    chain = np.arange(20_000)
    assert len(set(strong_components(chain, chain + 1, 20_001).tolist())) == 20_001
    assert reachable(*adjacency(chain, chain + 1, 20_001), 5).tolist() == list(range(5, 20_001))


@examples(200)
@given(EDGES)
def test_components_and_reach_are_those_of_networkx(edges: list[tuple[int, int]]) -> None:
    graph = networkx.DiGraph(edges)
    graph.add_nodes_from(range(NODES))
    sources, targets = np.array(edges, np.int64).reshape(-1, 2).T
    component = strong_components(sources, targets, NODES)
    found = {frozenset(np.flatnonzero(component == number).tolist()) for number in set(component.tolist())}
    assert found == {frozenset(part) for part in networkx.strongly_connected_components(graph)}
    for node in range(NODES):
        expected = sorted({node} | networkx.descendants(graph, node))
        assert reachable(*adjacency(sources, targets, NODES), node).tolist() == expected
