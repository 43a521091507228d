"""Stores that an older tracekit wrote into one file: read as they are, refused by writers, migrated into a folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.dashboards.page_text import Pages
from tests.handmade import SLOW_STEP_S, run, slow_trace
from tracekit.base.errors import StoreError
from tracekit.job.load import load_from_store
from tracekit.store import Incoming, Store
from tracekit.store.care import migrate

PACKED = Path(__file__).parent / "stores" / "version2.duckdb.gz"
#: Imported one after the other.
JOBS = ["no graph", "no report", "slow job"]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.duckdb"
    path.write_bytes(gzip.decompress(PACKED.read_bytes()))
    return path


def same(one: Store, other: Store) -> None:
    """Both stores hold the same of every job."""
    assert [(job.name, job.source, job.imported_at, job.layout, job.steps, job.ops) for job in one.jobs()] == [
        (job.name, job.source, job.imported_at, job.layout, job.steps, job.ops) for job in other.jobs()
    ]
    for name in JOBS:
        first, second = load_from_store(name, store=one.path).trace, load_from_store(name, store=other.path).trace
        assert first.ops.equals(second.ops)
        assert (first.step_starts, first.metadata) == (second.step_starts, second.metadata)
        assert one.report(name) == other.report(name)
        workers = one.workers(name), other.workers(name)
        assert workers[0] is workers[1] is None or (workers[0] is not None and workers[0].equals(workers[1]))
    figures = ["name", "slowdown", "recorded_s", "problem", "analysed", "started_at", "ended_at", "cause_places"]
    assert one.job_list().select(figures).equals(other.job_list().select(figures))


def test_an_older_store_is_read_as_it_is(old: Path) -> None:
    before = old.read_bytes()
    store = Store(old)
    assert [job.name for job in store.jobs()] == JOBS
    job = load_from_store("slow job", store=old)
    assert job.trace.ops.equals(slow_trace((3, 8)).ops)
    assert dict(job.trace.step_starts) == {3: 1.5e9, 8: 1.5e9 + 15.5}
    assert job.whatif().attribution.original.mean() == SLOW_STEP_S
    assert json.loads(store.report("slow job") or "")["slowdown"] == job.whatif().slowdown
    assert (store.report("no report"), store.workers("no report")) == (None, None)
    assert "slow job" in run("info", "--store", old).out
    pages = Pages(old)
    assert "straggler" in pages.text("/job", job="slow job")
    assert "a send without its recv" in pages.text("/job", job="no graph")
    assert "8" in pages.text("/workers", job="slow job", step="8")
    assert old.read_bytes() == before


def test_an_older_store_is_not_written(old: Path) -> None:
    before = old.read_bytes()
    with pytest.raises(
        StoreError, match=r"read-only; convert it to a folder with `tracekit store migrate .*old\.duckdb`"
    ):
        Store(old).add([Incoming(slow_trace(), "new", "x")])
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == ["old.duckdb"]


def test_a_migrated_store_holds_the_same(old: Path) -> None:
    before = old.read_bytes()
    ran = run("store", "migrate", old)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("Migrated 3 jobs to ")
    same(Store(old), Store(old.with_suffix(".store")))
    assert old.read_bytes() == before


def test_a_store_is_not_migrated_into_another(old: Path, tmp_path: Path) -> None:
    Store(tmp_path / "there").add([Incoming(slow_trace(), "new", "x")])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    for name, reason in (("there", "already exists"), ("folder", "is a folder, but not a tracekit store")):
        ran = run("store", "migrate", old, "--out", tmp_path / name)
        assert (ran.code, reason in ran.message) == (2, True)
    with pytest.raises(StoreError, match="already a folder; only single-file stores need migrating"):
        migrate(tmp_path / "there", tmp_path / "new")


def test_the_care_of_an_older_store_begins_with_its_migration(old: Path) -> None:
    for command in (["check"], ["repair"], ["prune", "--max-size", "1"]):
        ran = run("store", *command, "--store", old)
        assert (ran.code, "convert it to a folder with `tracekit store migrate" in ran.message) == (2, True)
