"""Without optional packages: every command that does not need them runs, and what needs one names the extra."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tracekit
from tests.handmade import run, slow_trace
from tracekit.base.errors import MissingExtraError

ROOT = Path(__file__).parents[1]
OPTIONAL = ("networkx", "pandas", "pyarrow")
COMMANDS = (
    "whatif slow.parquet --csv tables --parquet table.parquet --html report.html --by rank",
    "whatif slow.parquet --parquet table.parquet",
    "import slow.parquet --store jobs.store",
    "whatif --store jobs.store --json",
    "store list --store jobs.store",
    "store check jobs.store",
    "store sql from/**/ops --store jobs.store --csv",
    "store export slow.parquet --out timeline.json.gz",
    "compare slow.parquet slow.parquet",
    "culprits slow.parquet --suspects --format json",
    "synth --out made.parquet --dp 2 --pp 2 --steps 4",
    "fleet run slow.parquet --out study",
    "fleet report study",
    "metrics alerts rules",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    slow_trace().write_parquet(tmp_path / "slow.parquet")
    return tmp_path


@pytest.mark.slow
def test_commands_run_without_optional_packages(folder: Path) -> None:
    """And without knowing the name of the distribution, which is not that of the command."""
    code = (
        f"import importlib.metadata, sys; sys.modules |= dict.fromkeys({OPTIONAL})\n"
        "of = importlib.metadata.version; ours = lambda name: name.startswith('tracekit')\n"
        "importlib.metadata.version = lambda name: 1 / 0 if ours(name) else of(name)\n"
        "from tracekit.__main__ import main\n"
        "for line in sys.stdin:\n"
        "    sys.argv = ['tracekit', *line.split()]\n"
        "    try: main()\n"
        "    except SystemExit as stop: print(stop.code, line, end='', file=sys.stderr)\n"
    )
    given = "".join(f"{command}\n" for command in COMMANDS)
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, input=given, capture_output=True, text=True)
    ended = [line for line in ran.stderr.splitlines() if line.partition(" ")[2] in COMMANDS]
    expected = [f"{6 if command.startswith('culprits') else 0} {command}" for command in COMMANDS]  # no host is named
    assert ended == expected, ran.stderr


@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_packages_are_extras(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any(requirement.startswith(name) for requirement in project["dependencies"])
    extras = project["optional-dependencies"]
    assert any(requirement.startswith(name) for extra in extras for requirement in extras[extra])


def test_a_frame_of_pandas_names_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tracekit.load(folder / "slow.parquet")
    assert len(job.report.pandas("by_worker")) == len(job.pandas("by_worker")) == 4
    for name in ("pandas", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tracekit-analysis\[pandas\]'"):
        job.report.pandas("by_worker")


def test_a_graph_for_networkx_names_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tracekit.load(folder / "slow.parquet").replay.graph
    with pytest.raises(KeyError, match="step 9 is not in the graph; it has"):
        graph.to_networkx(9)
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(
        MissingExtraError, match=r"networkx, which is not installed: pip install 'tracekit-analysis\[networkx\]'"
    ):
        graph.to_networkx()


def test_a_store_in_object_storage_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from tracekit.base import paths

    paths._filesystem.cache_clear()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    ran = run("store", "list", "--store", "s3://bucket/jobs.store")
    assert ran.code == 2
    assert ran.message.endswith("s3:// needs pyarrow, which is not installed: pip install 'tracekit-analysis[storage]'")
