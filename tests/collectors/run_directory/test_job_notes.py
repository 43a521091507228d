"""Notes about running jobs: only this user's count, and nothing of another user is overwritten."""

import json
import os

import pytest

from tracekit.collectors.run_directory.steering import RunningJob, announced, running_jobs

HERE = os.getpid()


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A folder for temporary files that all users share; returns the place for notes in it."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return folder / f"tracekit-jobs-{os.geteuid()}"


def note(name="mine"):
    return json.dumps({"directory": "/run-1", "name": name, "started": None})


def test_a_job_is_found_while_it_runs(shared, tmp_path):
    """In a folder that no other user can enter, and that is kept."""
    with announced("mine", tmp_path):
        assert shared.stat().st_mode & 0o777 == 0o700
        assert running_jobs() == [RunningJob("mine", tmp_path, HERE)]
    assert running_jobs() == []
    assert list(shared.iterdir()) == []


def test_a_private_folder_for_the_runtime_is_preferred(shared, tmp_path, monkeypatch):
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with announced("mine", tmp_path):
        assert [path.name for path in runtime.glob("*/*")] == [f"{HERE}.json"]
        assert running_jobs() == [RunningJob("mine", tmp_path, HERE)]
    assert not shared.exists()


def test_a_folder_for_the_runtime_that_others_can_enter_is_not(shared, tmp_path, monkeypatch):
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    for mode in (0o755, 0o777):
        runtime.chmod(mode)
        with announced("mine", tmp_path):
            assert [path.name for path in shared.iterdir()] == [f"{HERE}.json"], oct(mode)
        assert list(runtime.iterdir()) == []


def linked(place, elsewhere):
    place.symlink_to(elsewhere)


def open_to_all(place, _elsewhere):
    place.mkdir()
    place.chmod(0o777)
    (place / f"{HERE}.json").symlink_to("../../elsewhere/victim")
    os.mkfifo(place / "1.json")


def a_pipe(place, _elsewhere):
    os.mkfifo(place)


def a_file(place, _elsewhere):
    place.write_text("mine")


@pytest.mark.parametrize("plant", [linked, open_to_all, a_pipe, a_file])
def test_what_another_user_put_in_the_place_is_left_alone_and_the_job_runs(shared, tmp_path, plant, capsys):
    """One line says that `attach` needs the folder. Nothing waits, and no note in there is believed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "victim").write_text("precious")
    (elsewhere / f"{os.getppid()}.json").write_text(note("planted"))
    plant(shared, elsewhere)
    with announced("mine", tmp_path):
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"tracekit: `tracekit attach` finds this job by its folder only: {shared}: ")
        assert running_jobs() == []
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {
        "victim": "precious",
        f"{os.getppid()}.json": note("planted"),
    }


def test_the_folder_of_another_user_is_not_trusted(shared, tmp_path, monkeypatch, capsys):
    """Here another user looks at ours, under the name of his own."""
    mine, ours = os.geteuid(), shared
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    theirs = ours.with_name(f"tracekit-jobs-{mine + 1}")
    theirs.mkdir(mode=0o700)
    (theirs / f"{os.getppid()}.json").write_text(note("planted"))
    with announced("mine", tmp_path):
        assert running_jobs() == []
    assert f"{theirs}: belongs to another user" in capsys.readouterr().err
    assert [path.name for path in theirs.iterdir()] == [f"{os.getppid()}.json"]


def test_without_a_place_for_temporary_files_the_job_runs(tmp_path, monkeypatch, capsys):
    def nowhere():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with announced("mine", tmp_path):
        assert "No usable temporary directory found" in capsys.readouterr().err


def test_a_damaged_note_is_passed_over(shared, tmp_path):
    with announced("mine", tmp_path):
        os.mkfifo(shared / "1.json")
        (shared / "2.json").symlink_to("/dev/zero")
        for content in (b"[" * 50_000, b"null", b"{", b'{"name": 1}', b"x" * 70_000, b"\xff"):
            (shared / f"{os.getppid()}.json").write_bytes(content)
            assert [job.name for job in running_jobs()] == ["mine"], content[:20]
