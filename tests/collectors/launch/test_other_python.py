"""A training whose Python lacks tracekit: it trains, and one line says what to install."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
import venv
from pathlib import Path

import pytest

from tests.cases import case
from tests.collectors.conftest import SCRIPTS, collect, plain
from tests.handmade import run_process
from tracekit.collectors.inject.tracekit_collect_hook import install_command
from tracekit.collectors.launch.doctor import Outcome, checks
from tracekit.collectors.launch.launcher import why_nothing_was_recorded


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


#: Two ranks, each a process of its own, as torchrun's are.
TWICE = ["sh", "-c", '"$0" "$1" & "$0" "$1"; code=$?; wait; exit $code']


def test_it_trains_and_one_line_says_how_to_install_the_recorder(other, tmp_path):
    """Not one per rank. The closing line names the same reason, and no other."""
    ran, (first, last) = under_collect(tmp_path, [*TWICE, other, SCRIPTS / "quick.py"], STEPS=2)
    assert ran.returncode == 0, ran.stderr
    lacks = f"{other} cannot import tracekit's recorder (No module named 'tracekit')"
    found = re.fullmatch(
        rf"tracekit: {re.escape(lacks)}, so training continues without being recorded; install it: (.+)", first
    )
    assert last == f"tracekit: no trace: nothing was recorded: {lacks}"
    interpreter, *pip, source = shlex.split(found[1])
    assert (interpreter, pip) == (str(other), ["-m", "pip", "install"])
    assert (Path(source) / "pyproject.toml").is_file()


#: What torch does at the end of its import.
TORCH = """
import importlib.metadata
found = importlib.metadata.entry_points()
found = found.select(group="torch.backends") if hasattr(found, "select") else found["torch.backends"]
for one in found:
    one.load()()
"""


@pytest.fixture
def played(tmp_path) -> Path:
    """A folder with a torch that does only that."""
    (tmp_path / "played").mkdir()
    (tmp_path / "played" / "torch.py").write_text(TORCH)
    return tmp_path / "played"


def test_a_strangers_package_of_the_same_name_is_named(other, played, tmp_path):
    """On the package index, `tracekit` is another project's, with the same import."""
    (packages,) = (other.parents[1] / "lib").glob("python*/site-packages")
    stranger = packages / "tracekit" / "__init__.py"
    stranger.parent.mkdir()
    stranger.write_text('__version__ = "0.3.1"\n')
    try:
        ran, (first, _) = under_collect(tmp_path, [other, "-c", "import torch"], PYTHONPATH=played)
    finally:
        shutil.rmtree(stranger.parent)
    assert ran.returncode == 0, ran.stderr
    assert f"; {stranger} is another project's package of that name: pip uninstall tracekit, then install it: " in first


def test_the_exit_code_of_a_training_that_fails_is_its_own(other, played, tmp_path):
    """With --live, too."""
    fails = "import torch; raise ValueError('the loss is not to my liking')"
    ran, said = under_collect(tmp_path, [other, "-c", fails], "--live", PYTHONPATH=played)
    assert ran.returncode == 1
    assert "ValueError: the loss is not to my liking" in ran.stderr
    assert [line for line in said if " -m pip install " in line] == said[:1]
    assert said[-1] == "tracekit: the command ended with exit code 1"


def test_the_doctor_says_so(other, tmp_path):
    """In full: the command can be copied."""
    found = {check.subject: check for check, _ in zip(checks(str(other), tmp_path / "jobs"), range(3), strict=False)}
    assert found["torch"].outcome is Outcome.OK
    assert found["recorder"].outcome is Outcome.FAILS
    assert found["recorder"].found == (
        f"{other} cannot import tracekit (No module named 'tracekit'); install it: {install_command(str(other))}"
    )


def test_nothing_is_blamed_that_is_not_known(tmp_path):
    """Without a reason, the options of Python that keep a recorder out are named, all of them."""
    for option in ("-E", "-I", "-S", "PYTHONPATH"):
        assert option in why_nothing_was_recorded(tmp_path)


#: Ways for the recorder to be broken in the Python of the training -> what the line says.
BROKEN = {
    "raise ImportError('libfoo.so: cannot open')": "cannot import tracekit's recorder (libfoo.so: cannot open)",
    "import sys; sys.exit(3)": "cannot start tracekit's recorder (SystemExit: 3)",
    "def broken(:": "cannot start tracekit's recorder (SyntaxError: ",
    "pass": "cannot start tracekit's recorder (AttributeError: ",
    "def arm(): raise RecursionError('deep')": "cannot start tracekit's recorder (RecursionError: deep)",
    "def arm(): raise MemoryError": "cannot start tracekit's recorder (MemoryError: )",
}


@pytest.mark.parametrize("options", [(), ("-S",)], ids=["both ways in", "only torch's"])
def test_a_recorder_that_is_broken_ends_no_import(options, played, tmp_path):
    """Whatever it raises: `import torch` succeeds, and the line appears once, from the first process of the job."""
    bootstrap = tmp_path / "path" / "tracekit" / "collectors" / "runtime" / "bootstrap.py"
    bootstrap.parent.mkdir(parents=True)
    for folder in (bootstrap.parent, *bootstrap.parents[1:3]):
        (folder / "__init__.py").touch()
    path = os.pathsep.join(map(str, [SCRIPTS.parents[2] / "collectors" / "inject", tmp_path / "path", played]))
    python = [sys.executable, "-s", "-B", *options, "-c", "import torch; import json; print('trains')"]
    for number, (source, said) in enumerate(BROKEN.items()):
        bootstrap.write_text(source)
        run = tmp_path / f"run {number}"
        run.mkdir()
        for expected in (1, 0) if number == 0 else (1,):
            ran = plain(python, tmp_path, PYTHONPATH=path, TRACEKIT_COLLECT_DIR=run)
            with case((source, expected)):
                assert (ran.returncode, ran.stdout) == (0, "trains\n"), ran.stderr
                assert ran.stderr.count(said) == expected
                assert len(ran.stderr.splitlines()) == expected


def test_python_that_does_not_train_says_nothing(other, tmp_path):
    """A helper script in another Python, without torch, is none of the job."""
    ran = collect(tmp_path, [str(other), "-c", "print('helps')"])
    assert (ran.process.returncode, ran.process.stdout.splitlines()[0]) == (0, "helps")
    assert "cannot import" not in ran.process.stderr


def test_collecting_a_command_without_python_blames_no_python(tmp_path):
    ran = run_process("collect", "--no-store", "--", "true", cwd=tmp_path)
    assert ran.code == 0
    assert "no process of the command trained with torch, or `python -E`" in ran.err
