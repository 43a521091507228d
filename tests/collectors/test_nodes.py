"""A run over several nodes: each node has its own `collect`, the first one merges."""

import json
import socket
import subprocess
import sys

import pytest

from tests.collectors.conftest import SCRIPTS, TIMEOUT_S, environment
from tracekit.trace import read_parquet

pytest.importorskip("torch", reason="collecting needs the extra `torch`")


def test_two_nodes_share_the_segments_folder(tmp_path):
    """Both nodes' ranks are in one trace; the node that started first writes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for node in range(2):
        collect = [sys.executable, "-m", "tracekit.collectors", "--segments", "shared", "--no-store", "--json"]
        run = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
        where = ["--master-addr", "127.0.0.1", "--master-port", str(port), str(SCRIPTS / "ddp_accumulation.py")]
        nodes.append(
            subprocess.Popen(
                [*collect, "--out", f"node{node}.parquet", "--", sys.executable, *run, *where],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [node.communicate(timeout=TIMEOUT_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    summaries = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert sorted(summary["merged_elsewhere"] for summary in summaries) == [False, True]
    (written,) = tmp_path.glob("node*.parquet")
    trace = read_parquet(written)
    assert trace.layout.world_size == trace.layout.dp == 2
    assert trace.coverage().complete
    assert trace.metadata["missing_ranks"] == []
