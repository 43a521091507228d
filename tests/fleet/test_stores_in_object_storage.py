"""A store that was copied to object storage is read there as it is in its folder, and never written."""

from __future__ import annotations

import os
import re
import urllib.request
from pathlib import Path

import pytest

from tests.fleet.buckets import put, upload
from tests.handmade import command, run, run_process
from tests.reports import hang_with
from tests.test_store_windows import window
from tracekit.base.errors import NotStoredError, StoreError
from tracekit.base.paths import has_bucket
from tracekit.fleet.sources import find_sources
from tracekit.store import Incoming, Store
from tracekit.store import folder as store_folder

pytestmark = [pytest.mark.fleet, pytest.mark.filterwarnings("ignore")]  # of libraries that are not ours


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    """A store of one job with two windows and a hang."""
    store = Store(tmp_path / "live.store")
    store.append(window(0))
    store.append(window(1, analysed=True))
    store.add_hang("live", ["it hangs"], hang_with())
    return store


@pytest.fixture
def address(folder: Store, cloud: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where its copy is; every look sees what is there."""
    monkeypatch.setattr(store_folder, "LOOKED_AT_EVERY_S", 0.0)
    upload(folder.path, f"{cloud}://stores/live")
    return f"{cloud}://stores/live"


def test_everything_reads_as_in_the_folder(folder: Store, address: str) -> None:
    there = Store(Path(address))
    assert (there.jobs(), there.windows("live"), there.incidents()) == (
        folder.jobs(),
        folder.windows("live"),
        folder.incidents(),
    )
    assert there.load("live", 0).ops.equals(folder.load("live", 0).ops)
    assert (there.report("live", 0), there.report("live")) == (None, folder.report("live"))
    assert there.workers("live").equals(folder.workers("live"))
    assert there.hangs("live") == folder.hangs("live")
    with pytest.raises(NotStoredError, match=rf"^{address}: no job 'life'; did you mean 'live'\?"):
        there.load("life")


def test_storage_that_is_busy_at_first_is_asked_again(busy_s3: str) -> None:
    assert not has_bucket(f"{busy_s3}://absent/live")


@pytest.mark.parametrize(
    "words",
    [
        ("whatif", "--store", "{}", "--job", "live"),
        ("store", "list", "--store", "{}"),
        ("store", "windows", "live", "--store", "{}"),
        ("store", "incidents", "--store", "{}"),
        ("store", "top", "--once", "--store", "{}"),
        ("hang", "{}"),
    ],
    ids=" ".join,
)
def test_commands_print_what_they_print_of_the_folder(words: tuple[str, ...], folder: Store, address: str) -> None:
    here, there = (
        run(*(word.format(place) for word in words), env={"COLUMNS": "300"}) for place in (folder.path, address)
    )  # wide enough for both addresses
    assert there.code == here.code, there.err
    assert _without_ages(there.out).replace(address, "X") == _without_ages(here.out).replace(str(folder.path), "X")


def _without_ages(text: str) -> str:
    return re.sub(r"\d+ (s|min)\b", "a while", text)


def test_a_window_that_lands_is_seen_and_a_copy_without_it_is_one_clear_error(folder: Store, address: str) -> None:
    there = Store(Path(address))
    before = there.state()
    folder.append(window(2))
    put(f"{address}/catalog.duckdb", (folder.path / "catalog.duckdb").read_bytes())
    assert there.state() != before
    with pytest.raises(StoreError, match=rf"^{address}/jobs/1/2\.parquet: is missing; copy windows before"):
        there.load("live")
    upload(folder.path, address)
    assert there.load("live").ops.equals(folder.load("live").ops)
    put(f"{address}/jobs/1/2.parquet", b"PAR1")
    with pytest.raises(StoreError, match=rf"^{address}/jobs/1/2\.parquet: damaged, or copied only in part"):
        there.load("live")


def test_writing_is_one_clear_error_and_writes_nothing(folder: Store, address: str, tmp_path: Path) -> None:
    there = Store(Path(address))
    for write in (
        lambda: there.append(window(2)),
        lambda: there.add([Incoming(window(0).trace, "new", "x")]),
        lambda: there.begin_watch("live", "x"),
        lambda: there.add_hang("live", [], hang_with()),
    ):
        with pytest.raises(StoreError, match=rf"^{address}: a store in object storage is read-only; write to a folder"):
            write()
    (tmp_path / "run").mkdir()
    for words in (
        ("watch", tmp_path / "run", "--store", address),
        ("import", "sample_traces/slow_worker.parquet", "--store", address),
        ("store", "check", "--store", address),
        ("store", "repair", "--store", address),
        ("store", "prune", "--max-size", "1", "--store", address),
    ):
        ran = run(*words)
        assert (ran.code, "a store in object storage is read-only" in ran.message) == (2, True), (words, ran.err)
    assert not list(tmp_path.glob("*:")), "a folder of that name was made"
    # What trains is not kept from it; the recording is kept.
    started = tmp_path / "started"
    ran = run_process("collect", "--store", address, "--", "touch", started, cwd=tmp_path)
    assert "a store in object storage is read-only" in ran.err
    assert started.exists()
    assert there.windows("live") == folder.windows("live")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("stores/nothing", "no tracekit store at 'nothing' in bucket 'stores'; choose another --store"),
        ("nowhere/at/all", "no such bucket, 'nowhere'; check the address and {variables}"),
    ],
)
def test_no_store_there_is_one_clear_error(place: str, said: str, cloud: str, address: str) -> None:
    variables = {"s3": "AWS_*", "gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_STORAGE_*"}[cloud]
    ran = run("store", "list", "--store", f"{cloud}://{place}")
    assert (ran.code, ran.message) == (2, f"tracekit: {cloud}://{place}: {said.format(variables=variables)}"), ran.err


def test_hangs_are_added_to_the_folder_that_it_is_a_copy_of(address: str) -> None:
    ran = run("hang", address, "--job", "other")
    assert ran.message == (
        f"tracekit: {address}: keeps no hang of a job 'other'; `tracekit collect --hang-after 120 --store FOLDER --"
        " COMMAND` adds them, and a copy of FOLDER there has them"
    )


def test_the_dashboard_shows_it(folder: Store, address: str) -> None:
    import subprocess

    served = subprocess.Popen(
        command("dashboard", address, "--port", "0"), stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert served.stdout is not None
        line = served.stdout.readline()
        url = re.search(rf"dashboard of {address}: (\S+)", line)
        assert url is not None, line
        with urllib.request.urlopen(f"{url[1]}readyz", timeout=60) as answer:
            assert answer.read() == b"ok, 1 jobs\n"
        with urllib.request.urlopen(f"{url[1]}download/by_worker.csv?job=live", timeout=60) as answer:
            assert answer.read().startswith(b"dp_rank,pp_rank,")
    finally:
        served.terminate()
        served.wait(60)


def test_a_fleet_studies_the_windows_that_it_names(cloud: str, address: str) -> None:
    assert [one.url for one in find_sources([f"{cloud}://stores"])] == [f"{address}/jobs/1/{n}.parquet" for n in (0, 1)]
