"""The sample traces are what their script makes, and say what their README says."""

import runpy
import sys
from pathlib import Path

import pytest

import tracekit
from tests.cases import case
from tracekit.trace.canonical import read_parquet

SAMPLES = Path(__file__).resolve().parents[1] / "sample_traces"


@pytest.mark.slow
def test_the_script_makes_the_same_traces(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make.py", str(tmp_path)])
    runpy.run_path(str(SAMPLES / "make.py"), run_name="__main__")
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made
    for name in made:
        ours, theirs = read_parquet(SAMPLES / name), read_parquet(tmp_path / name)
        assert ours.layout == theirs.layout
        assert ours.metadata == theirs.metadata
        # Another processor may round a logarithm differently in the last bit.
        assert ours.ops.drop("start", "duration").equals(theirs.ops.drop("start", "duration"))
        for column in ("start", "duration"):
            assert ours.ops[column].to_list() == pytest.approx(theirs.ops[column].to_list(), rel=1e-9)


def test_samples_straggle_as_described():
    slow = {"slow_worker", "slow_last_stage", "sequence_lengths", "python_gc", "collected"}
    for name in slow | {"healthy", "collected_healthy"}:
        found = tracekit.load(SAMPLES / f"{name}.parquet").attribution
        with case(name):
            assert found.straggling is (name in slow)
            assert found.trust.trustworthy
