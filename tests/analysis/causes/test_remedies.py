"""Remedies name the ranks and nodes of a cause."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from tests.analysis.causes.test_naming import NAMES
from tracekit.analysis.detectors.detector import advice_text, own_detectors, remedy_for
from tracekit.analysis.evidence.subject import JobKind, Names
from tracekit.report.finding import Link, Place
from tracekit.trace.model import Worker

UNKNOWN = replace(NAMES, ranks={}, hosts={}, host_of_rank={})


@pytest.mark.parametrize(
    ("where", "names", "words"),
    [
        (Place(workers=(Worker(2, 1),)), NAMES, "rank 5 on node-1: move it"),
        (Place(workers=(Worker(2, 1),)), replace(NAMES, hosts={}), "rank 5 on its node: move it"),
        (Place(workers=(Worker(2, 0),)), replace(NAMES, alike=2), "ranks 4-5 on node-1: move them"),
        (Place(workers=(Worker(0, 0), Worker(4, 1))), NAMES, "ranks 0 and 9 on node-0 and node-2: move them"),
        (Place(workers=tuple(NAMES.ranks)), NAMES, "ranks 0-15 on node-0, node-1, node-2 and node-3: move them"),
        (Place(ranks=(5,)), NAMES, "rank 5 on node-1: move it"),
        (Place(dp_ranks=(2,)), NAMES, "DP rank 2 on node-1: move it"),
        (Place(host="node-3"), NAMES, "all ranks on node-3: move them"),
        (Place(steps=(4,)), NAMES, "all ranks on the hosts: move them"),
        (
            Place(workers=(Worker(2, 1), Worker(3, 1))),
            UNKNOWN,
            "workers dp 2, stage 1 and dp 3, stage 1 on their nodes: move them",
        ),
    ],
)
def test_ranks_and_nodes_are_filled_in(where: Place, names: Names, words: str) -> None:
    assert remedy_for("{ranks} on {hosts}: move {it}", names, where) == words


@pytest.mark.parametrize(
    ("link", "ends"),
    [
        (Link(1, 0, 1), "rank 2 and rank 3"),
        (Link(1, 1, 0), "rank 3 and rank 2"),
        (Link(9, 0, 1), "dp 9, stage 0 and dp 9, stage 1"),
    ],
)
def test_a_link_within_a_node_is_called_by_its_ranks(link: Link, ends: str) -> None:
    assert remedy_for("{ends}", NAMES, Place(links=(link,))) == ends


def test_a_link_between_nodes_is_called_by_its_nodes() -> None:
    apart = replace(NAMES, hosts={worker: f"node-{worker.pp_rank}" for worker in NAMES.ranks})
    assert remedy_for("{ends}", apart, Place(links=(Link(1, 0, 1),))) == "node-0 and node-1"
    assert remedy_for("{ends}", apart, Place(links=(Link(1, 1, 0), Link(2, 0, 1)))) == "node-1 and node-0"


@pytest.mark.parametrize("rule", own_detectors(JobKind.PIPELINE), ids=lambda rule: str(rule.kind))
def test_advice_for_a_job_without_gpus_names_no_tool_of_gpus(rule) -> None:
    words = advice_text(rule.next_check, on_cpus=True) + advice_text(rule.suggested_fix, on_cpus=True)
    assert not re.search("nvidia|NVLINK|DCGM", words)


@pytest.mark.parametrize("rule", [one for one in own_detectors() if one.suggested_fix], ids=lambda rule: str(rule.kind))
def test_every_remedy_can_be_filled_in(rule) -> None:
    for where in (Place(), Place(workers=(Worker(2, 1),)), Place(links=(Link(1, 0, 1),))):
        words = remedy_for(rule.suggested_fix, NAMES, where)
        assert words
        assert "{" not in words
