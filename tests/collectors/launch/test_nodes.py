"""A run over several nodes: each node has its own `collect`, the first one merges."""

import json
import shutil
import socket
import subprocess
import sys

from tests.collectors.conftest import TIMEOUT_S, environment, python
from tracekit.collectors.importers.registry import read_any
from tracekit.trace.canonical import read_parquet


def run_nodes(directory, segments):
    """Two nodes of one rank each, as Slurm or Kubernetes start them, node n with the folder segments[n].

    What each `collect` said, and its summary.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for node, folder in enumerate(segments):
        collect = [sys.executable, "-m", "tracekit", "collect", "--segments", folder, "--no-store", "--json"]
        place = {"RANK": node, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        nodes.append(
            subprocess.Popen(
                [*collect, "--out", f"node{node}.parquet", "--", *python("quick.py")],
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


def test_two_nodes_share_the_segments_folder(tmp_path):
    """Both nodes' ranks are in one trace; the node that started first writes it."""
    ran = run_nodes(tmp_path, ("shared", "shared"))
    assert sorted(summary["merged_elsewhere"] for summary, _ in ran) == [False, True]
    (written,) = tmp_path.glob("node*.parquet")
    trace = read_parquet(written)
    assert trace.layout.world_size == trace.layout.dp == 2
    assert trace.coverage().complete
    assert trace.metadata["missing_ranks"] == []


def test_folders_of_nodes_that_share_none_are_copied_together(tmp_path):
    """Each node warns that it lacks the other's rank; copied into one folder they are one trace."""
    for node, (summary, said) in enumerate(run_nodes(tmp_path, ("one", "two"))):
        assert summary["attempts"][0]["missing_ranks"] == [1 - node]
        assert f"rank {1 - node} reported nothing; the trace lacks them" in said
    shutil.copytree(tmp_path / "two", tmp_path / "one", dirs_exist_ok=True)
    trace = read_any(tmp_path / "one")
    assert trace.layout.dp == 2
    assert trace.coverage().complete
    assert trace.metadata["missing_ranks"] == []
    assert abs(trace.ops["start"]).max() < TIMEOUT_S  # one clock: a boot lies between two
