"""Windows of a job: appended one by one, listed, pruned, checked and repaired; and what ends a writer at any moment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from unittest.mock import ANY

import duckdb
import pytest
from msgspec import structs

from tests.handmade import Ran, findings_of, little_space, run, slow_trace
from tests.test_op_trace import DP, OPS
from tracekit.analysis.job.graph import GraphJob
from tracekit.analysis.job.pipeline import PipelineJob
from tracekit.base.errors import NotStoredError, StoreError
from tracekit.report.findings import Findings
from tracekit.sources.load import load_from_store
from tracekit.store import Incoming, Store, catalogue_file
from tracekit.store.care import damages, prune, repair
from tracekit.store.catalogue_rows import WindowPart
from tracekit.store.folder import Folder
from tracekit.trace.op import OpTrace


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "live.store")


@cache
def window(number: int, name: str = "live", *, analysed: bool = False) -> Incoming:
    """Window `number` of a job: two steps of its own, at an hour of its own."""
    steps = (2 * number, 2 * number + 1)
    starts = {step: 1.7e9 + 3600.0 * number + step for step in steps}
    trace = slow_trace(steps, name=name, step_starts=starts, metadata={"framework": "torch", "hosts": {"0": "node-a"}})
    return Incoming(trace, name, "collect", PipelineJob(trace).stored() if analysed else None)


def files(store: Store) -> set[str]:
    return {str(path.relative_to(store.path / "jobs")) for path in store.path.glob("jobs/*/*")}


def test_windows_of_a_job_are_numbered_listed_and_loaded(store: Store) -> None:
    store.add([Incoming(slow_trace((0,), name="other"), "other", "file")])
    assert [store.append(window(number)) for number in range(3)] == [0, 1, 2]
    assert [(one.number, one.first_step, one.last_step, one.ops) for one in store.windows("live")] == [
        (0, 0, 1, 96),
        (1, 2, 3, 96),
        (2, 4, 5, 96),
    ]
    assert store.load("live").ops.equals(window(2).trace.ops)
    assert store.load("live", 1).ops.equals(window(1).trace.ops)
    live, other = store.jobs()
    assert (live.name, live.windows, live.steps, live.ops) == ("live", 3, 6, 288)
    assert (other.windows, store.newest()) == (1, "live")
    with pytest.raises(NotStoredError, match="job 'live' has no window 3; it has 0 to 2"):
        store.load("live", 3)
    assert "windows" in run("store", "list", "--store", store.path).out
    lines = run("store", "windows", "live", "--store", store.path).out.splitlines()[1:]
    assert [" ".join(line.split()) for line in lines] == [
        "0 0 to 1 - not analysed",
        "1 2 to 3 - not analysed",
        "2 4 to 5 - not analysed",
    ]


def test_lists_show_the_newest_window(store: Store) -> None:
    store.append(window(0))
    store.append(window(1, analysed=True))
    row = store.job_list().row(0, named=True)
    assert (row["number"], row["windows"], row["all_steps"], row["first_step"]) == (1, 2, 4, 2)
    assert (row["started_at"], row["ended_at"]) == (1.7e9 + 3602, 1.7e9 + 3603)
    assert json.loads(row["metadata"]) == {"framework": "torch"}
    assert row["slowdown"] == pytest.approx(15.5 / 13.5)
    assert row["cause_hosts"] == [None] * len(row["cause_kinds"])
    assert (store.report("live", 0), store.workers("live", 0)) == (None, None)
    with duckdb.connect(str(store.path / "catalog.duckdb"), read_only=True) as connection:
        assert connection.execute("SELECT job_id, host FROM hosts").fetchall() == [(1, "node-a")]


def test_the_file_of_a_window_is_a_trace_by_itself(store: Store) -> None:
    """Under the name of the job in the store."""
    store.append(Incoming(slow_trace(name="as recorded"), "renamed", "file"))
    found = json.loads(run("whatif", store.path / "jobs" / "1" / "0.parquet", "--json").out)
    assert found["job"]["name"] == "renamed"
    by_window = run("whatif", "--store", store.path, "--job", "renamed", "--window", "0", "--json").out
    assert json.loads(by_window) == found


def test_a_window_of_another_kind_is_an_error(store: Store) -> None:
    store.append(window(0))
    with pytest.raises(StoreError, match="has windows of kind pipeline, this one is of kind ops"):
        store.append(Incoming(OpTrace(OPS, "live", groups=DP), "live", "file"))
    assert files(store) == {"1/0.parquet"}


@pytest.mark.slow
def test_an_op_trace_is_stored_listed_exported_and_asked_again(tmp_path: Path) -> None:
    trace = OpTrace(OPS, "two ranks", groups=DP, metadata={"gpu": "H200"})
    trace.write_parquet(tmp_path / "ops.parquet")
    path = tmp_path / "jobs.store"
    assert run("import", tmp_path / "ops.parquet", "--store", path).code == 0
    (job,) = Store(path).jobs()
    assert (job.kind, job.layout, job.ranks, job.steps, job.ops) == ("ops", None, 2, 2, 9)
    loaded = load_from_store("two ranks", store=path)
    assert loaded.trace.ops.equals(OPS)
    assert (loaded.trace.groups, loaded.trace.metadata) == (DP, {"gpu": "H200"})
    asked = ("--json", "--fix", "kind=gc")
    of_file, of_store = run("whatif", tmp_path / "ops.parquet", *asked), run("whatif", "--store", path, *asked)
    assert json.loads(of_store.out) == json.loads(of_file.out) | {"run": ANY}
    assert Store(path).report("two ranks") == GraphJob(trace).whatif()
    row = Store(path).job_list().row(0, named=True)
    # 4.5 s of each of 2 steps on 2 ranks: at the pace of rank 0, steps of 4 and 9 s take 2 s
    assert (row["slowdown"], row["lost_gpu_hours"]) == (pytest.approx(6.5 / 3), pytest.approx(18 / 3600))
    assert "two ranks" in run("store", "list", "--store", path).out
    assert "Ranks   2" in run("store", "list", "--store", path, "--job", "two ranks").out
    assert run("store", "export", "--store", path, "--out", tmp_path / "again.parquet").code == 0
    assert run("whatif", tmp_path / "again.parquet", *asked).out == of_file.out


def test_an_op_trace_that_is_none_is_not_stored(tmp_path: Path) -> None:
    OpTrace(OPS.drop("rank"), "bad", groups=DP).write_parquet(tmp_path / "bad.parquet")
    ran = run("import", tmp_path / "bad.parquet", "--store", tmp_path / "jobs.store")
    assert (ran.code, "rank" in ran.message) == (2, True)
    assert not (tmp_path / "jobs.store").exists()


# ---- care


def test_a_whole_store_has_nothing_to_repair(store: Store) -> None:
    store.append(window(0, analysed=True))
    assert list(damages(store)) == repair(store, findings_of) == []
    assert run("store", "check", "--store", store.path).out == f"{store.path}: all files are whole\n"


def test_damage_is_found_and_dropped_and_all_else_stays(store: Store) -> None:
    for number in range(4):
        store.append(window(number, analysed=number < 2))
    folder = store.path / "jobs" / "1"
    content = bytearray((folder / "0.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "0.parquet").write_bytes(content)  # as long as before
    (folder / "1.report.json").unlink()
    (folder / "2.parquet").write_bytes(b"")
    (folder / "7.parquet").write_bytes(b"a killed writer's")
    found = run("store", "check", "--store", store.path)
    assert found.code == 3
    assert [line.split(": ")[0] for line in found.out.splitlines()] == [
        "live, window 0",
        "live, window 1",
        "live, window 2",
        str(folder / "7.parquet"),
        str(store.path),
    ]
    lines = run("store", "repair", "--store", store.path).out.splitlines()
    (moved,) = store.path.glob("left-out/*/1/7.parquet")
    assert [line.split(": ")[1].split(";")[0] for line in lines] == [
        "dropped its ops",
        "dropped its report",
        "dropped",
        "its report was made anew from its ops",
        "moved to " + str(moved),
    ]
    assert moved.read_bytes() == b"a killed writer's"
    assert list(damages(store)) == []
    assert [one.number for one in store.windows("live")] == [0, 1, 3]
    assert store.report("live", 0) is not None
    with pytest.raises(NotStoredError, match="the ops of job 'live', window 0, were pruned; its report is still there"):
        store.load("live", 0)
    assert store.load("live", 1).ops.equals(window(1).trace.ops)
    assert store.report("live", 1) == PipelineJob(window(1).trace).report
    assert store.append(window(4)) == 4


def test_a_report_of_another_version_is_made_anew_once_and_stays_where_ops_are_gone(store: Store) -> None:
    """As it was written, and yet not to be read: of version 2, or with other keys than today's."""
    whole = window(0, analysed=True)
    assert isinstance(whole.findings, Findings)
    old = structs.replace(whole.findings, report=structs.replace(whole.findings.report, report_version=2))
    store.append(replace(whole, findings=old))
    store.append(replace(window(1), findings=old))
    store.append(window(2, analysed=True))
    assert [store.report("live", number) is None for number in range(3)] == [True, True, False]
    with store.writing() as writer:
        writer.remove_part(writer.catalogue.window("live", 1), WindowPart.OPS)
    before = store.windows("live")
    checked = run("store", "check", "--store", store.path)
    assert (checked.code, "reports on 1 window are of another version" in checked.out) == (3, True)
    stays = "live, window 1: its report is of another version, and its ops are gone: it stays as it is"
    assert repair(store, findings_of) == ["live, window 0: its report was made anew from its ops", stays]
    assert store.report("live", 0) == PipelineJob(window(0).trace).report
    assert store.workers("live", 0) is not None
    assert [(one.number, one.added_at) for one in store.windows("live")] == [
        (one.number, one.added_at) for one in before
    ]
    assert (list(damages(store)), repair(store, findings_of)) == ([], [stays])


def test_a_repair_forgets_no_job_while_the_folder_of_all_files_is_away(store: Store) -> None:
    store.append(window(0, analysed=True))
    away = store.path.with_name("not mounted")
    (store.path / "jobs").rename(away)
    refused = run("store", "repair", "--store", store.path)
    assert refused.code == 2
    assert "jobs: is missing with the files of all jobs" in refused.err
    away.rename(store.path / "jobs")
    assert run("store", "repair", "--store", store.path).out.endswith(": nothing to repair\n")
    assert store.load("live").ops.equals(window(0).trace.ops)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["Catalogue.add_windows", "CatalogueCopy.put", "Folder.forget_unfinished"])
def test_what_a_living_writer_has_not_finished_is_no_damage_and_what_a_killed_one_left_is(
    moment: str, store: Store
) -> None:
    """The writer is held with a file that no window names, before its catalogue is there, and before its note goes."""
    store.append(window(0, analysed=True))
    held = (
        "from tracekit.store.catalogue import Catalogue; from tracekit.store.catalogue_file import CatalogueCopy\n"
        "from tracekit.store.folder import Folder\n"
        f"going_on = {moment}\n"
        "def hold(*given):\n"
        "    print('held', flush=True); sys.stdin.read(1); return going_on(*given)\n"
        f"{moment} = hold\n"
        "store.append(window(1, analysed=True))"
    )
    with subprocess.Popen(program(held, store), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "held\n"
        assert run("store", "check", "--store", store.path).code == 0
        (store.path / "jobs" / "1" / "7.parquet").write_bytes(b"nobody's")
        assert run("store", "check", "--store", store.path).out.splitlines()[-1].endswith(": 1 damaged")
        (store.path / "jobs" / "1" / "7.parquet").unlink()
        writer.kill()
    named = moment == "Folder.forget_unfinished"
    assert len(list(damages(store))) == (0 if named else 3)
    assert len(store.windows("live")) == (2 if named else 1)


def test_windows_that_land_and_go_while_files_are_checked_are_no_damage(store: Store) -> None:
    store.append(window(0))
    store.add([Incoming(slow_trace((0,)), "replaced", "x")])
    went_on = iter(
        (
            lambda: store.append(window(1)),
            lambda: store.add([Incoming(slow_trace((0,)), "replaced", "x")], replace=True),
        )
    )
    assert list(damages(store, lambda _: next(went_on)())) == []


def test_a_catalogue_that_is_gone_is_made_anew_of_the_traces(store: Store) -> None:
    store.add([Incoming(slow_trace((0,), name="other"), "other", "file")])
    store.append(window(0))
    store.append(window(1, analysed=True))
    report = store.report("live")
    (store.path / "catalog.duckdb").unlink()
    for use in (store.jobs, lambda: store.append(window(2))):
        with pytest.raises(StoreError, match=r"its catalog\.duckdb is missing; .* `tracekit store repair"):
            use()
    assert len(repair(store, findings_of)) == 3
    assert {job.name: job.windows for job in store.jobs()} == {"live": 2, "other": 1}
    assert (store.report("live"), list(damages(store))) == (report, [])
    store.append(window(0, "third"))
    assert store.append(window(2)) == 2
    assert list(damages(store)) == []


@pytest.mark.slow
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"x")], ids=["pruned", "damaged"])
def test_a_catalogue_made_anew_names_windows_without_a_trace_and_the_next_one_lands(
    damage: Callable[[Path], object], store: Store
) -> None:
    """The report of such a window is kept, and in nobody's way."""
    for number in range(3):
        store.append(window(number, analysed=True))
    report = store.report("live", 2)
    damage(store.path / "jobs" / "1" / "2.parquet")
    (store.path / "catalog.duckdb").unlink()
    named = run("store", "repair", "--store", store.path).out
    kept = list(store.path.glob("left-out/*/1/2.*"))
    assert {path.name for path in kept} >= {"2.report.json", "2.workers.parquet"}
    assert all(str(path) in named for path in kept)
    assert report is not None
    assert report.to_json() in [path.read_text(encoding="utf-8") for path in kept if path.suffix == ".json"]
    assert list(damages(store)) == []
    assert store.append(window(2)) == 2
    assert (store.report("live", 2), [one.number for one in store.windows("live")]) == (None, [0, 1, 2])


def test_damaged_reports_and_foreign_files_do_not_keep_a_catalogue_from_being_made_anew(store: Store) -> None:
    store.append(window(0, analysed=True))
    store.append(window(1, analysed=True))
    (store.path / "jobs" / "1" / "0.report.json").write_text('{"job": {}}')
    (store.path / "jobs" / "mine").mkdir()
    (store.path / "jobs" / "mine" / "0.parquet").write_bytes(b"x")
    (store.path / "catalog.duckdb").unlink()
    assert run("store", "repair", "--store", store.path).code == 0
    assert [one.number for one in store.windows("live")] == [0, 1]
    assert (store.report("live", 0), store.report("live", 1) is None) == (None, False)
    assert {path.name for path in store.path.glob("left-out/*/*/*")} == {
        "0.parquet",
        "0.report.json",
        "0.workers.parquet",
    }
    assert list(damages(store)) == []


def test_a_window_that_a_killed_writer_had_stored_outlives_the_catalogue(store: Store) -> None:
    """Its note was still there, and the note of a writer without a catalogue names what to remove."""
    store.append(window(0))
    store.append(window(1))
    (store.path / "unfinished").write_text("1 1\n")
    (store.path / "catalog.duckdb").unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"its catalog\.duckdb is missing; .* `tracekit store repair"):
            store.append(window(2))
    assert len(repair(store, findings_of)) == 2
    assert [one.number for one in store.windows("live")] == [0, 1]


def test_a_file_that_no_window_names_is_not_written_over(store: Store) -> None:
    """As after an older catalogue was put back."""
    store.append(window(0, analysed=True))
    before = (store.path / "catalog.duckdb").read_bytes()
    store.append(window(1, analysed=True))
    (store.path / "catalog.duckdb").write_bytes(before)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"1/1\.parquet: is in the way of a new window, .* `tracekit store repair"):
            store.append(window(2))
    assert len(repair(store, findings_of)) == 3
    assert store.append(window(2)) == 1


def test_pruning_removes_the_oldest_ops_and_keeps_what_was_found(store: Store) -> None:
    for number in range(3):
        store.append(window(number, analysed=True))
    sizes = [sum(file.bytes for file in one.files.values()) for one in store.windows("live")]
    assert prune(store, older_than=timedelta(days=1), most_bytes=sum(sizes)) == []
    assert len(prune(store, most_bytes=sum(sizes) - 1)) == 1
    assert {name for name in files(store) if "/0." in name} == {"1/0.report.json", "1/0.workers.parquet"}
    assert store.report("live", 0) is not None
    ran = run("store", "prune", "--store", store.path, "--older-than", "0m")
    assert len(ran.out.splitlines()) == 2
    ran = run("whatif", "--store", store.path, "--job", "live")
    assert (ran.code, "the ops of job 'live', window 2, were pruned" in ran.message) == (2, True)
    assert store.job_list()["slowdown"].to_list() == [pytest.approx(15.5 / 13.5)]
    assert "nothing to prune" in run("store", "prune", "--store", store.path, "--max-size", "1").out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "say what to prune"),
        (("--older-than", "soon"), "--older-than 'soon'; expected a number"),
        (("--max-size", "-1"), "--max-size '-1'; expected a number of bytes"),
    ],
)
def test_what_cannot_be_pruned_is_said(arguments: tuple[str, ...], reason: str, store: Store) -> None:
    store.append(window(0))
    ran: Ran = run("store", "prune", "--store", store.path, *arguments)
    assert (ran.code, reason in ran.message) == (2, True)
    assert files(store) == {"1/0.parquet"}


def test_the_care_of_a_store_takes_it_as_an_argument(store: Store) -> None:
    store.append(window(0))
    for command in (["check"], ["repair"], ["prune", "--max-size", "1G"]):
        with_option = run("store", *command, "--store", store.path)
        assert run("store", *command, store.path) == with_option
        assert with_option.code == 0
        ran = run("store", *command, store.path, "--store", store.path)
        assert (ran.code, "two stores" in ran.message) == (2, True)


def test_a_store_in_the_place_of_a_job_is_answered_with_the_right_form(store: Store) -> None:
    store.append(window(0))
    ran = run("store", "windows", store.path)
    assert ran.code == 2
    assert f"a store, not a job; type `tracekit store windows JOB --store {store.path}`" in ran.message


def test_a_store_in_the_place_of_a_job_that_may_be_left_out_is_the_store(store: Store, tmp_path: Path) -> None:
    store.append(window(0, analysed=True))
    for command in (["top", "--once"], ["incidents"]):
        ran, with_option = (run("store", *command, *words) for words in ((store.path,), ("--store", store.path)))
        assert ran.code == with_option.code == 0
        assert ran.out.splitlines()[1] == with_option.out.splitlines()[1]
        ran = run("store", *command, store.path, "--store", store.path)
        assert (ran.code, "two stores" in ran.message) == (2, True)
        missing = run("store", *command, tmp_path / "later.store")
        assert (missing.code, f"{tmp_path / 'later.store'}: no such store" in missing.message) == (2, True)


# ---- robustness


def program(text: str, store: Store) -> list[str | Path]:
    """A process of its own that does that."""
    imports = (
        "import sys; from pathlib import Path\n"
        "from tests.handmade import slow_trace; from tests.test_store_windows import window\n"
        "from tracekit.store import Incoming, Store\n"
        "store = Store(Path(sys.argv[1]))\n"
    )
    return [sys.executable, "-c", imports + text, store.path]


@pytest.mark.parametrize("limit", [20_000, 2_000_000], ids=["trace", "catalogue"])
def test_a_full_disk_leaves_the_store_as_it_was(limit: int, store: Store) -> None:
    """Whether the trace does not fit, or the catalogue."""
    store.append(window(0))
    before = (store.path / "catalog.duckdb").read_bytes()
    trace = slow_trace(range(500 if limit < len(before) else 2))
    with little_space(limit), pytest.raises(StoreError):
        store.append(Incoming(trace, "live", "x"))
    assert (store.path / "catalog.duckdb").read_bytes() == before
    assert files(store) == {"1/0.parquet"}
    assert store.append(window(1)) == 1


@pytest.mark.slow
def test_a_reader_finds_what_it_looks_for_while_windows_land_and_jobs_are_replaced(store: Store) -> None:
    """Each state that a reader sees is whole: as many ops as the catalogue says, of the steps that it says."""
    store.append(window(0))
    store.add([Incoming(slow_trace((0,)), "replaced", "x")])
    windows = 4
    write = (
        f"for number in range(1, {windows}):\n"
        "    store.append(window(number))\n"
        "    store.add([Incoming(slow_trace(range(number + 1)), 'replaced', 'x')], replace=True)"
    )
    reads = 0
    with subprocess.Popen(program(write, store)) as writing:
        while writing.poll() is None or not reads:
            seen = store.windows("live")
            newest = store.load("live", seen[-1].number)
            assert newest.steps.tolist() == [seen[-1].first_step, seen[-1].last_step]
            assert [one.number for one in seen] == list(range(len(seen)))
            assert store.load("replaced").ops.height % 48 == 0
            reads += 1
    assert writing.returncode == 0
    assert len(store.windows("live")) == windows
    assert {name.split("/")[0] for name in files(store)} == {"1", str(windows + 1)}


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True])
def test_a_catalogue_replaced_while_it_is_opened_is_read_in_one_state(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, torn: bool
) -> None:
    """The old one by its descriptor; the new one where the system of files no longer has the old one."""
    store.append(window(0))
    attach = catalogue_file._attach

    def attach_late(reader: duckdb.DuckDBPyConnection, name: str, path: str, *, read_only: bool = False) -> None:
        attach(reader, name, path, read_only=read_only)
        monkeypatch.setattr(catalogue_file, "_attach", attach)
        subprocess.run(program("store.append(window(1))", store), check=True)
        if torn:
            reader.execute(f"DETACH {name}")
            raise duckdb.IOException("Could not read enough bytes from file")

    monkeypatch.setattr(catalogue_file, "_attach", attach_late)
    assert [one.number for one in store.windows("live")] == ([0, 1] if torn else [0])
    assert [one.number for one in store.windows("live")] == [0, 1]


@pytest.mark.slow
def test_a_first_writer_that_finishes_between_two_looks_of_a_reader_is_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has seen no catalogue, then files of jobs and no note that somebody is writing them."""
    Folder(store.path).make()
    check = Folder.check_no_jobs

    def check_late(folder: Folder) -> None:
        monkeypatch.setattr(Folder, "check_no_jobs", check)
        subprocess.run(program("store.append(window(0))", store), check=True)
        check(folder)

    monkeypatch.setattr(Folder, "check_no_jobs", check_late)
    assert [one.number for one in store.windows("live")] == [0]


@pytest.mark.slow
def test_no_window_that_was_reported_is_lost_to_a_kill(store: Store) -> None:
    """A writer appends and says so, until it is killed; then the next one."""
    write = "for number in range(1000): print(store.append(window(number)), flush=True)"
    reported: list[int] = []
    for kill_after in (1, 3):
        with subprocess.Popen(program(write, store), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                reported.append(int(line))
                if len(reported) >= kill_after:
                    process.kill()
        kept = [one.number for one in store.windows("live")]
        assert kept == list(range(len(kept)))
        assert set(reported) <= set(kept)
        assert all(store.load("live", number).ops.height == 96 for number in kept)
    number = store.append(window(0))
    assert files(store) == {f"1/{one}.parquet" for one in range(number + 1)}


def test_reports_on_windows_of_several_jobs_are_read_in_one_go(store: Store) -> None:
    store.append(window(0, analysed=True))
    store.append(window(1))
    store.append(window(0, "other", analysed=True))
    asked = [("live", 0), ("live", 1), ("live", 7), ("gone", 0), ("other", 0)]
    found = {(name, number): store.report(name, number) for name, number in (("live", 0), ("other", 0))}
    assert store.reports(asked) == found
    assert store.reports([]) == {}
