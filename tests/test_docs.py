"""What the documents say is true: commands run, output is as shown, links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.handmade import COMMANDS, run

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md")])


def words(line):
    import shlex

    return shlex.split(line.removeprefix("$ tracekit "))


@pytest.fixture
def workplace(tmp_path):
    (tmp_path / "sample_traces").symlink_to(ROOT / "sample_traces")
    return tmp_path


def test_every_command_of_the_readme_runs_and_prints_what_is_shown(workplace):
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        for shown in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)[1:]:
            command, _, output = shown.partition("\n")
            ran = run(*words(command), cwd=workplace)
            assert ran.code == 0, f"{command}\n{ran.err}"
            if output.strip():
                assert [line.rstrip() for line in ran.out.rstrip().splitlines()] == output.rstrip().splitlines()


def test_the_example_of_an_op_trace_runs_and_says_what_slows_it(workplace):
    """Rank 1 takes 160 ms where 130 ms is the mean: S = 190 / 160; as fast as rank 0 it saves 60 ms."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "op-trace.md").read_text(), re.DOTALL)
    ran = subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=workplace, check=True, capture_output=True)
    slowdown, saved = map(float, ran.stdout.split())
    assert slowdown == pytest.approx(190 / 160)
    assert saved == pytest.approx(0.06)


def test_every_python_block_of_the_readme_runs(workplace):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=workplace, check=True)


def test_links_between_documents_lead_somewhere():
    made_with_the_site = {"commands.md"}
    for document in DOCUMENTS:
        for target in set(re.findall(r"\]\(([^)#]+)", document.read_text())) - made_with_the_site:
            assert target.startswith("https://") or (document.parent / target).exists(), f"{document}: {target}"


def test_the_readme_shows_every_command():
    for name in COMMANDS:
        assert f"tracekit {name}" in README


def test_the_glossary_names_every_op_kind():
    from tracekit.trace.model import OpKind

    assert all(f"`{kind}`" in README for kind in OpKind)


def test_the_readme_lists_every_exit_code():
    from tracekit.base.exit_codes import ExitCode

    table = README[README.index("| exit code |") :].split("\n\n")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == sorted(ExitCode)
