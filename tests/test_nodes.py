"""One rule about nodes on every surface: drained only with hardware evidence in a report that can be trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboards.page_text import Pages
from tests.handmade import run
from tests.test_culprits_command import named
from tracekit.report.conclusions import Culprit, Nodes, nodes_of
from tracekit.store import Store


def culprit(host: str | None, *, hardware: bool = False) -> Culprit:
    return Culprit(None, None, None, host, None, "compute", 1.0, 0.9, None, hardware)


def test_only_evidence_in_a_trusted_report_makes_a_node_one_to_drain() -> None:
    rows = [culprit("a", hardware=True), culprit("b", hardware=False), culprit("a", hardware=False), culprit(None)]
    assert nodes_of(rows, trusted=True) == Nodes(("a",), ("b",))
    assert nodes_of(rows, trusted=False) == Nodes((), ("a", "b"))
    assert nodes_of([culprit("no name of a node"), culprit("$(reboot)", hardware=True)], trusted=True) == Nodes((), ())
    assert nodes_of([culprit("old-1")], trusted=True) == Nodes((), ("old-1",))


def test_what_is_said_of_nodes() -> None:
    assert Nodes((), ()).sentence is None
    assert Nodes(("a", "b"), ("c",)).sentence == "Drain a, b: the recording shows hardware at fault there."
    assert Nodes((), tuple("abcde")).sentence == (
        "Do not drain 5 hosts yet: the recording shows no hardware at fault there."
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("throttled", "said", "unsaid", "slurm"),
    [
        (True, "Drain gpu-017: the recording shows hardware at fault there.", "Do not drain", "gpu-017\n"),
        (False, "Do not drain gpu-017 yet: the recording shows no hardware at fault there.", "Drain gpu-017", ""),
    ],
    ids=["throttled GPU", "slow, and nothing known of the GPU"],
)
def test_pages_and_scripts_say_the_same_of_a_node(
    tmp_path: Path, *, throttled: bool, said: str, unsaid: str, slurm: str
) -> None:
    job = named(tmp_path, {9: "gpu-017", 8: "gpu-018"}, throttled=throttled)
    store = tmp_path / "jobs.store"
    assert run("import", job, "--store", store, "--name", "job").code == 0
    pages = Pages(store)
    for page in ("/job", "/workers"):
        text = pages.text(page, job="job")
        assert said in text
        assert unsaid not in text
    assert run("culprits", "--store", store, "--format", "slurm").out == slurm
    report = Store(store).report("job")
    assert report is not None
    assert ("if throttled, swap the node" in report.to_json()) is not throttled
