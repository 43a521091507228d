"""A training whose Python lacks tracekit is recorded, too; where that fails it trains, and one line says why."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import venv
from pathlib import Path

import pytest

from tests.cases import case
from tests.collectors.conftest import SCRIPTS, collect, plain
from tests.handmade import run_process
from tracekit.collectors.launch.doctor import CheckOutcome, checks
from tracekit.collectors.launch.launcher import INJECTED, why_nothing_was_recorded


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The Python of an environment that has what this one has, without what its .pth files add: tracekit."""
    directory = tmp_path_factory.mktemp("other") / "venv"
    venv.create(directory, symlinks=True)
    (packages,) = (directory / "lib").glob("python*/site-packages")
    torch = importlib.util.find_spec("torch").origin
    (packages / "base.pth").write_text(f"{Path(torch).parents[1]}\n")
    return directory / "bin" / "python"


def under_collect(directory, command, *options, **variables):
    """The run, and its lines on stderr that are tracekit's."""
    under = [sys.executable, "-m", "tracekit", "collect", *options, "--store", "jobs", "--", *map(str, command)]
    ran = plain(under, directory, **variables)
    return ran, [line for line in ran.stderr.splitlines() if line.startswith("tracekit: ")]


@pytest.mark.slow
def test_it_is_recorded(other, tmp_path):
    """By the files of the launcher's tracekit, whatever the training's Python has installed."""
    ran, _ = under_collect(tmp_path, [other, SCRIPTS / "quick.py"])
    assert ran.returncode == 0, ran.stderr
    assert "tracekit: recorded 5 steps, " in ran.stderr


@pytest.mark.slow
def test_the_doctor_says_so(other, tmp_path):
    found = {check.subject: check for check, _ in zip(checks(str(other), tmp_path / "jobs"), range(3), strict=False)}
    assert found["torch"].outcome is CheckOutcome.OK
    assert (found["recorder"].outcome, found["recorder"].detail) == (CheckOutcome.OK, f"loads in {other}")


#: A user's sitecustomize that keeps the recorder from being loaded.
REFUSES = "import sys; sys.modules['_tracekit_recorder.collectors'] = None"
#: Two ranks, each a process of its own, as torchrun's are.
TWICE = ["sh", "-c", '"$0" "$1" & "$0" "$1"; code=$?; wait; exit $code']


@pytest.mark.slow
def test_a_recorder_that_cannot_be_loaded_is_one_line(other, tmp_path):
    """Not one per rank. The closing line names the same reason, and no other."""
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    ran, (first, last) = under_collect(tmp_path, [*TWICE, other, SCRIPTS / "quick.py"], STEPS=2, PYTHONPATH=tmp_path)
    assert ran.returncode == 0, ran.stderr
    reason = re.escape(
        f"{other} cannot start tracekit's recorder (ModuleNotFoundError: No module named '_tracekit_recorder.c"
    )
    match = re.fullmatch(rf"tracekit: ({reason}.+), so training continues without being recorded", first)
    assert last == f"tracekit: no trace: nothing was recorded: {match[1]}"


#: What torch does: it imports what trains, and runs the entry points at the end.
TORCH = """
import torch.optim
import importlib.metadata
found = importlib.metadata.entry_points()
found = found.select(group="torch.backends") if hasattr(found, "select") else found["torch.backends"]
for one in found:
    one.load()()
"""


@pytest.fixture
def played(tmp_path) -> Path:
    """A folder with a torch that does only that."""
    torch = tmp_path / "played" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text(TORCH)
    (torch / "optim.py").touch()
    return torch.parent


@pytest.mark.slow
def test_the_exit_code_of_a_training_that_fails_is_its_own(other, played, tmp_path):
    """With --live, too."""
    (played / "sitecustomize.py").write_text(REFUSES)
    fails = "import torch; raise ValueError('the loss is not to my liking')"
    ran, said = under_collect(tmp_path, [other, "-c", fails], "--live", PYTHONPATH=played)
    assert ran.returncode == 1
    assert "ValueError: the loss is not to my liking" in ran.stderr
    assert [line for line in said if "training continues" in line] == said[:1]
    assert said[-1] == "tracekit: the command ended with exit code 1"


def test_nothing_is_blamed_that_is_not_known(tmp_path):
    """Without a reason, the options of Python that keep a recorder out are named, all of them."""
    for option in ("-E", "-I", "-S", "PYTHONPATH"):
        assert option in why_nothing_was_recorded(tmp_path)


#: Ways for the recorder to be broken in the Python of the training -> the reason in the line.
BROKEN = {
    "raise ImportError('libfoo.so: cannot open')": "(ImportError: libfoo.so: cannot open)",
    "import sys; sys.exit(3)": "(SystemExit: 3)",
    "def broken(:": "(SyntaxError: ",
    "pass": "(AttributeError: ",
    "def arm(): raise RecursionError('deep')": "(RecursionError: deep)",
    "def arm(): raise MemoryError": "(MemoryError: )",
}


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-S",)], ids=["both ways in", "only torch's"])
def test_a_recorder_that_is_broken_ends_no_import(options, played, tmp_path):
    """Whatever it raises: `import torch` succeeds, and the line appears once, from the first process of the job."""
    inject = tmp_path / "tracekit" / "collectors" / "record" / "inject"
    shutil.copytree(INJECTED, inject)
    bootstrap = inject.parent / "bootstrap.py"
    path = os.pathsep.join(map(str, [inject, played]))
    python = [sys.executable, "-s", "-B", *options, "-c", "import torch; import json; print('trains')"]
    for number, (source, said) in enumerate(BROKEN.items()):
        bootstrap.write_text(source)
        run = tmp_path / f"run {number}"
        run.mkdir()
        for expected in (1, 0) if number == 0 else (1,):
            ran = plain(python, tmp_path, PYTHONPATH=path, TRACEKIT_COLLECT_DIR=run)
            with case((source, expected)):
                assert (ran.returncode, ran.stdout) == (0, "trains\n"), ran.stderr
                assert ran.stderr.count(f"cannot start tracekit's recorder {said}") == expected
                assert len(ran.stderr.splitlines()) == expected


@pytest.mark.slow
def test_python_that_does_not_train_says_nothing(other, tmp_path):
    """A helper script in another Python, without torch, is none of the job."""
    ran = collect(tmp_path, [str(other), "-c", "print('helps')"])
    assert (ran.process.returncode, ran.process.stdout.splitlines()[0]) == (0, "helps")
    assert "recorder (" not in ran.process.stderr


@pytest.mark.slow
def test_collecting_a_command_without_python_blames_no_python(tmp_path):
    ran = run_process("collect", "--no-store", "--", "true", cwd=tmp_path)
    assert ran.code == 0
    assert "no process of the command trained with torch, or `python -E`" in ran.err
