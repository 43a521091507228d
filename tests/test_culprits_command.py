"""`tracekit culprits` as a script uses it: what is on stdout, what on stderr, and the exit code."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tests.handmade import run
from tracekit.base.errors import ExitCode
from tracekit.report.conclusions import Nodes
from tracekit.trace.canonical import Trace, read_parquet

SAMPLES = Path(__file__).parents[1] / "sample_traces"


def named(folder: Path, hosts: dict[int, str], *, throttled: bool = True) -> Path:
    """The job with a slow rank 9, whose ranks are on these hosts; its GPU is throttled, or nothing is known of it."""
    trace = read_parquet(SAMPLES / "slow_worker.parquet")
    metadata = {**trace.metadata, "hosts": {str(rank): host for rank, host in hosts.items()}}
    if throttled:
        metadata["gpus"] = {"8": {"reasons": {}}, "9": {"reasons": {"hw-thermal-slowdown": 0.75}}}
    renamed = Trace.from_frame(trace.ops, trace.layout, name=trace.name, metadata=metadata)
    renamed.write_parquet(folder / "named.parquet")
    return folder / "named.parquet"


def test_slurm_gets_the_node_and_nothing_else(tmp_path: Path) -> None:
    ran = run("culprits", named(tmp_path, {9: "gpu-017", 8: "gpu-018"}), "--format", "slurm")
    assert (ran.out, ran.code) == ("gpu-017\n", ExitCode.DONE)


def test_a_script_gets_a_node_without_hardware_evidence_only_where_it_asks_for_suspects(tmp_path: Path) -> None:
    """A slow compute alone can be user code, input, or a neighbour on the cores."""
    job = named(tmp_path, {9: "gpu-017"}, throttled=False)
    ran = run("culprits", job, "--format", "slurm")
    assert (ran.out, ran.code) == ("", ExitCode.NO_ANSWER)
    assert f"{Nodes((), ('gpu-017',)).sentence} Check first; --suspects prints them" in ran.message
    asked = run("culprits", job, "--format", "slurm", "--suspects")
    assert (asked.out, asked.err, asked.code) == ("gpu-017\n", "", ExitCode.DONE)
    found = json.loads(run("culprits", job, "--format", "json").out)
    assert (found["nodes"], found["hostlist"], found["suspects"]) == ([], "", ["gpu-017"])
    assert run("culprits", job).code == ExitCode.DONE


def test_json_says_who_in_what_and_at_which_price(tmp_path: Path) -> None:
    ran = run("culprits", named(tmp_path, {9: "gpu-017"}), "--format", "json")
    found = json.loads(ran.out)
    assert (found["nodes"], found["hostlist"], found["trustworthy"]) == (["gpu-017"], "gpu-017", True)
    (culprit,) = found["culprits"]
    assert (culprit["rank"], culprit["host"], culprit["part"]) == (9, "gpu-017", "compute")
    reported = json.loads(run("whatif", tmp_path / "named.parquet", "--json").out)["answer"]["culprits"]
    assert found["culprits"] == reported


def test_a_job_of_a_store_is_named_by_the_same_options(tmp_path: Path) -> None:
    assert run("import", SAMPLES / "slow_worker.parquet", "--store", tmp_path / "jobs").code == 0
    ran = run("culprits", "--store", tmp_path / "jobs", "--job", "slow-worker", "--format", "slurm", "--suspects")
    assert (ran.out, ran.code) == ("host-0001\n", ExitCode.DONE)


def test_a_culprit_whose_node_is_unknown_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """No host, or what is no node's name."""
    nameless: tuple[dict[int, str], ...] = ({}, {9: "$(reboot)"})
    for hosts, form in itertools.product(nameless, ("slurm", "text")):
        ran = run("culprits", named(tmp_path, hosts), "--format", form)
        assert ran.code == ExitCode.UNKNOWN_NODE, (hosts, form)
        assert "the node of rank 9 is unknown" in ran.message
        assert ("9" in ran.out) is (form == "text")


def test_a_healthy_job_names_nobody() -> None:
    ran = run("culprits", SAMPLES / "healthy.parquet", "--format", "slurm")
    assert (ran.out, ran.code) == ("", ExitCode.NO_ANSWER)
    assert "no rank is to blame" in ran.message


def test_a_report_that_cannot_be_trusted_hands_no_node_to_a_script(tmp_path: Path) -> None:
    """Launch delays that no cause explains: 0.5 s before every optimizer."""
    import polars as pl

    path = named(tmp_path, {9: "gpu-017"})
    trace = read_parquet(path)
    late = pl.when(pl.col("kind") == "optimizer").then(0.5).otherwise(0.0)
    ops = trace.ops.with_columns(pl.col("start") + late)
    Trace.from_frame(ops, trace.layout, name="late", metadata=trace.metadata).write_parquet(path)
    ran = run("culprits", path, "--format", "slurm")
    assert not json.loads(run("whatif", path, "--json").out)["trust"]["trustworthy"]
    assert (ran.out, ran.code) == ("", ExitCode.NO_ANSWER)


def test_only_parts_that_speak_of_a_machine() -> None:
    job = SAMPLES / "slow_worker.parquet"
    asked = ("culprits", job, "--format", "slurm", "--suspects")
    assert run(*asked, "--part", "compute", "--part", "network").out == "host-0001\n"
    assert run(*asked, "--part", "data-loading").code == ExitCode.NO_ANSWER
    ran = run("culprits", job, "--part", "gpu")
    assert ran.code == ExitCode.BAD_INPUT
    assert "--part 'gpu'; expected one of compute" in ran.message


def test_traces_of_gpus_name_the_rank_that_the_others_wait_for() -> None:
    ran = run("culprits", SAMPLES / "gpu_slow_input", "--format", "json")
    (culprit,) = json.loads(ran.out)["culprits"]
    assert (culprit["rank"], culprit["host"], culprit["part"]) == (2, "node-0", "data-loading")
    assert run("culprits", SAMPLES / "gpu_slow_input", "--unit", "s").code == ExitCode.BAD_INPUT
