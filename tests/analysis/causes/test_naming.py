"""Places are called by ranks and nodes, as people know them."""

import pytest

from tracekit.analysis.evidence.subject import Names
from tracekit.report.finding import Link, Place
from tracekit.trace.model import Worker

#: Eight DP ranks and two stages on four nodes: rank = 2 x dp_rank + stage.
WORKERS = [Worker(dp_rank, stage) for dp_rank in range(8) for stage in range(2)]
NAMES = Names(
    {worker: number for number, worker in enumerate(WORKERS)},
    {worker: f"node-{number // 4}" for number, worker in enumerate(WORKERS)},
    stages=2,
    host_of_rank={number: f"node-{number // 4}" for number in range(len(WORKERS))},
)


@pytest.mark.parametrize(
    ("where", "words", "plural"),
    [
        (Place(workers=(Worker(2, 1),)), "rank 5 on node-1", False),
        (Place(workers=(Worker(0, 0), Worker(0, 1), Worker(1, 0))), "ranks 0-2 on node-0", True),
        (Place(workers=(Worker(0, 0), Worker(4, 1))), "ranks 0 and 9 on node-0 and node-2", True),
        (
            Place(workers=(Worker(0, 0), Worker(9, 0))),
            "workers dp 0, stage 0 and dp 9, stage 0",
            True,
        ),  # one was not recorded
        (Place(links=(Link(1, 0, 1),)), "the link between rank 2 and rank 3 on node-0", False),
        (
            Place(links=(Link(1, 0, 1), Link(2, 0, 1))),
            "2 links, first the link between rank 2 and rank 3 on node-0",
            True,
        ),
        (Place(pp_ranks=(1,)), "stage 1", False),
        (Place(dp_ranks=(2, 3)), "DP ranks 2-3", True),
    ],
)
def test_a_place_is_called_by_its_ranks_and_nodes(where: Place, words: str, plural: bool) -> None:
    place = NAMES.place(where)
    assert place is not None
    assert (place.words, place.plural) == (words, plural)


def test_ranks_that_nothing_tells_apart_are_named_together() -> None:
    """Four ranks of tensor parallelism are one worker, of which the first is recorded: any of them may be slow."""
    workers = [Worker(0, 0), Worker(0, 1), Worker(1, 0)]
    hosts = dict(zip(workers, ("node-0", "node-1", "node-2"), strict=True))
    names = Names(dict(zip(workers, (0, 4, 8), strict=True)), hosts, stages=2, host_of_rank={}, alike=4)
    one, two = names.place(Place(workers=(workers[1],))), names.place(Place(workers=tuple(workers[1:])))
    link = names.place(Place(links=(Link(0, 0, 1),)))
    assert one is not None
    assert two is not None
    assert link is not None
    assert (one.words, one.plural) == ("the worker of ranks 4-7 on node-1", False)
    assert (two.words, two.plural) == ("ranks 4-11 on node-1 and node-2", True)
    assert link.words == "the link between rank 0 on node-0 and rank 4 on node-1"


def test_the_whole_job_has_no_name() -> None:
    assert NAMES.place(Place(steps=(1, 2))) is None


def test_without_a_pipeline_a_dp_rank_is_a_rank() -> None:
    names = Names({Worker(3, 0): 12}, {}, stages=1, host_of_rank={})
    place = names.place(Place(dp_ranks=(3,)))
    assert place is not None
    assert place.words == "rank 12"


def test_a_long_list_is_cut() -> None:
    place = NAMES.place(Place(workers=(*WORKERS[::3], WORKERS[1])))
    assert place is not None
    assert place.words == "7 ranks (0-1, 3, 6, 9, ...) on node-0, node-1, node-2 and node-3"
