"""A run over several nodes: each node has its own `collect`, the first one merges."""

import json
import shutil
import socket
import subprocess
import sys

import pytest

from tests.collectors.conftest import TIMEOUT_S, brings, environment, python
from tests.handmade import read_any
from tracekit.collectors.record.wire_format import rank_stem
from tracekit.trace.canonical import read_parquet

pytestmark = pytest.mark.slow


def run_nodes(directory, segments, commands):
    """Two nodes of one rank each, as Slurm or Kubernetes start them: node n runs commands[n], with folder segments[n].

    What each `collect` said, and its summary.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for node, (folder, command) in enumerate(zip(segments, commands, strict=True)):
        collect = [sys.executable, "-m", "tracekit", "collect", "--segments", folder, "--no-store", "--json"]
        place = {"RANK": node, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        nodes.append(
            subprocess.Popen(
                [*collect, "--out", f"node{node}.parquet", "--", *command],
                cwd=directory,
                env=environment(**place),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [node.communicate(timeout=TIMEOUT_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    return [(json.loads(out.splitlines()[-1]), err) for out, err in outputs]


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    """Where two nodes have trained together that share a folder of segments, and their summaries."""
    directory = tmp_path_factory.mktemp("sharing")
    ran = run_nodes(directory, ("shared", "shared"), [python("quick.py")] * 2)
    return directory, [summary for summary, _ in ran]


def test_two_nodes_share_the_segments_folder(sharing):
    """Both nodes' ranks are in one trace; the node that started first writes it."""
    directory, summaries = sharing
    assert sorted(summary["merged_elsewhere"] for summary in summaries) == [False, True]
    (written,) = directory.glob("node*.parquet")
    trace = read_parquet(written)
    assert trace.layout.world_size == trace.layout.dp == 2
    assert trace.coverage().complete
    assert trace.metadata["missing_ranks"] == []


def test_folders_of_nodes_that_share_none_are_copied_together(sharing, tmp_path):
    """Each node, whose command brings the segments of its rank, warns that it lacks the other's; copied into one folder
    they are one trace.
    """
    recorded, _ = sharing
    commands = [brings(recorded / "shared" / "attempt-000", rank_stem(node)) for node in (0, 1)]
    for node, (summary, said) in enumerate(run_nodes(tmp_path, ("one", "two"), commands)):
        assert summary["attempts"][0]["missing_ranks"] == [1 - node]
        assert f"rank {1 - node} reported nothing; the trace lacks them" in said
    shutil.copytree(tmp_path / "two", tmp_path / "one", dirs_exist_ok=True)
    trace = read_any(tmp_path / "one")
    assert trace.layout.dp == 2
    assert trace.coverage().complete
    assert trace.metadata["missing_ranks"] == []
    assert abs(trace.ops["start"]).max() < TIMEOUT_S  # one clock: a boot lies between two
