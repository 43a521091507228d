"""A job finds its own modules, and those of Python, as it does without `tracekit collect`."""

import ast
import json
import os
import sys
import venv
import zipapp
from pathlib import Path

import pytest

from tests.cases import case
from tests.collectors.conftest import SCRIPTS, plain
from tracekit.collectors.launch.launcher import INJECTED

ROOT = Path(__file__).parents[3]
#: The first lines of a job: what it can see of how Python finds modules.
FIRST = """
import sys
finders = [finder if isinstance(finder, type) else type(finder) for finder in sys.meta_path]
seen = [sorted(sys.modules), sys.path, [finder.__module__ for finder in finders], sorted(sys.path_importer_cache),
        [hook.__qualname__ for hook in sys.path_hooks]]
import json
print(json.dumps(seen))
"""
OURS = "_tracekit_recorder"


def under(run: Path, path: str = "") -> dict[str, str]:
    """The environment of a command that collects into `run`."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(INJECTED), path])), "TRACEKIT_COLLECT_DIR": str(run)}


@pytest.fixture
def job(tmp_path) -> Path:
    """A folder with a script, a module, an archive, and what users may have to customize their Python."""
    folder = tmp_path / "job"
    folder.mkdir()
    for name in ("first.py", "module.py", "__main__.py"):
        (folder / name).write_text(FIRST)
    zipapp.create_archive(folder, tmp_path / "job.pyz")
    (tmp_path / "job.pyz").rename(folder / "job.pyz")
    customs = tmp_path / "customs"
    customs.mkdir()
    for name in ("sitecustomize", "usercustomize"):
        (customs / f"{name}.py").write_text("import sys\nsys.path.append('/customs of ' + __name__)\n")
    return folder


#: How jobs start Python, where the hook is loaded.
STARTS = {
    "script": ["first.py"],
    "module": ["-m", "module"],
    "code": ["-c", FIRST],
    "folder": ["."],
    "archive": ["job.pyz"],
    "optimized": ["-OO", "first.py"],
    "without user site": ["-s", "first.py"],
    "not frozen": ["-X", "frozen_modules=off", "first.py"],
    "without byte code": ["-B", "first.py"],
}


def seen(python, arguments, job, **variables) -> list[list[str]]:
    ran = plain([str(python), *arguments], job, **variables)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    return json.loads(ran.stdout)


def test_the_first_line_of_a_job_sees_one_module_and_one_finder_more(job, tmp_path):
    """Both have a name that no job has; all else is as without: modules, paths, hooks of paths and their cache."""
    venv.create(tmp_path / "venv", symlinks=True)
    python, customs = str(tmp_path / "venv" / "bin" / "python"), str(tmp_path / "customs")
    cases = [*((python, customs, start) for start in STARTS), (python, "", "script"), (sys.executable, "", "script")]
    for interpreter, path, start in cases:
        alone = {"PYTHONPATH": path} if path else {}
        modules, paths, finders, *rest = seen(interpreter, STARTS[start], job, **alone)
        with case((interpreter, path, start)):
            assert seen(interpreter, STARTS[start], job, **under(tmp_path, path)) == [
                sorted([*modules, OURS]),
                paths,
                [OURS, *finders],
                *rest,
            ]
            assert ("/customs of sitecustomize" in paths) == bool(path)


@pytest.mark.parametrize("option", ["-I", "-E"])
def test_a_python_that_ignores_the_environment_sees_nothing(option, job, tmp_path):
    arguments = [option, "first.py"]
    assert seen(sys.executable, arguments, job, **under(tmp_path)) == seen(sys.executable, arguments, job)


def test_a_python_without_site_sees_the_folder_on_its_path(job, tmp_path):
    """Nothing of ours runs before torch does."""
    modules, paths, finders, cache, hooks = seen(sys.executable, ["-S", "first.py"], job)
    ours = [modules, [paths[0], str(INJECTED), *paths[1:]], finders, sorted([*cache, str(INJECTED)]), hooks]
    assert seen(sys.executable, ["-S", "first.py"], job, **under(tmp_path)) == ours


def test_errors_of_the_users_sitecustomize_are_reported_as_without(job, tmp_path):
    (tmp_path / "customs" / "sitecustomize.py").write_text("import no_such_module")
    path = str(tmp_path / "customs")
    said = [
        plain([sys.executable, "-c", "print('trains')"], job, **variables)
        for variables in ({"PYTHONPATH": path}, under(tmp_path, path))
    ]
    assert [(ran.returncode, ran.stdout, ran.stderr) for ran in said[1:]] == [(0, "trains\n", said[0].stderr)]
    assert "ModuleNotFoundError: No module named 'no_such_module'" in said[0].stderr


#: Names of tracekit's packages, of what is in them, and of modules of Python that torch does not import.
TAKEN = (
    "tracekit",
    "collectors",
    "analysis",
    "dashboards",
    "benchmarks",
    "record",
    "base",
    "trace",
    "session",
    "ring",
)
TAKEN_FROM_PYTHON = ("shlex", "plistlib", "sched")
TRAINS = """
import sys
import {names}
print(*sorted({{name.partition(".")[0] for name in sys.modules}} - {{"_tracekit_recorder"}}))
assert all(module.OWN for module in ({names},))
import runpy
runpy.run_path("{script}", run_name="__main__")
print(*sorted({{name for name in sys.modules if not name.startswith("_tracekit_recorder")}}))
"""


@pytest.mark.slow
def test_a_job_whose_modules_are_called_as_ours_is_recorded(tmp_path):
    """It imports its own ones; no module of Python is loaded but those that it loads by itself."""
    for name in (*TAKEN, *TAKEN_FROM_PYTHON):
        own = tmp_path / f"{name}.py"
        if name in ("collectors", "tracekit"):
            own = tmp_path / name / "__init__.py"
            own.parent.mkdir()
        own.write_text("OWN = True\n")
    (tmp_path / "train.py").write_text(
        TRAINS.format(names=", ".join((*TAKEN, *TAKEN_FROM_PYTHON)), script=SCRIPTS / "quick.py")
    )
    launcher = str(Path(sys.executable).with_name("tracekit"))
    command = [launcher, "collect", "--no-store", "--out", "out.parquet", "--", sys.executable, "train.py"]
    ran, alone = plain(command, tmp_path), plain(command[6:], tmp_path)
    assert (ran.returncode, alone.returncode) == (0, 0), ran.stderr
    assert ran.stdout == alone.stdout
    assert "tracekit: recorded 5 steps, " in ran.stderr


@pytest.mark.slow
def test_what_a_script_calls_reaches_the_recorder_also_before_torch(tmp_path):
    """`tracekit` is loaded once more under its own name, but keeps no state there. A broken recorder is left alone."""
    code = """
import sys
import tracekit
{}
from tracekit.collectors import log, set_step, span
print({{function.__module__ for function in (tracekit.step, log, set_step, span)}})
"""
    broken = "sys.modules['_tracekit_recorder.collectors'] = None"
    names = ("_tracekit_recorder.collectors.record.spans", "tracekit.collectors.record.spans")
    for line, variables, name in (
        ("", under(tmp_path), names[0]),
        (broken, under(tmp_path), names[1]),
        ("", {}, names[1]),
    ):
        ran = plain([sys.executable, "-c", code.format(line)], tmp_path, **variables)
        with case((line, name)):
            assert (ran.stdout, ran.stderr) == (f"{{'{name}'}}\n", "")


def test_the_recorder_imports_itself_by_relative_names():
    """Also in modules that few trainings load: others would import the job's own `tracekit`."""
    shared = [ROOT / "tracekit" / name for name in ("base/errors.py", "base/text.py", "trace/model.py")]
    for path in (*(ROOT / "collectors" / "record").glob("*.py"), *INJECTED.glob("*.py"), *shared):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert "tracekit" not in {name.partition(".")[0] for name in names}, path
