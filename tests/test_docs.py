"""What the documents say is true: commands run, output is as shown, links and names of files lead somewhere."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.handmade import COMMANDS, run
from tracekit.base.errors import ExitCode

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/decisions/*.md")])
FOLDERS = (
    ".github",
    "analysis",
    "benchmarks",
    "collectors",
    "dashboards",
    "deploy",
    "docs",
    "judges",
    "sample_traces",
    "tests",
    "tracekit",
)


def words(line):
    import shlex

    return shlex.split(line.removeprefix("$ tracekit "))


@pytest.fixture
def workplace(tmp_path):
    (tmp_path / "sample_traces").symlink_to(ROOT / "sample_traces")
    return tmp_path


def blocks(document, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("document", "least"),
    [
        ("README.md", 1),
        pytest.param("docs/report.md", 3, marks=pytest.mark.slow),
        ("docs/scripts.md", 2),
        ("docs/fleet.md", 1),
    ],
    ids=str,
)
def test_every_command_shown_runs_and_prints_what_is_shown(document, least, workplace):
    found = blocks(document, "console")
    assert len(found) >= least
    for block in found:
        for shown in re.split(r"^(?=\$ )", block, flags=re.MULTILINE)[1:]:
            command, _, output = shown.partition("\n")
            ran = run(*words(command), cwd=workplace)
            expected = ExitCode.CONDITION if command.startswith("$ tracekit gate") else ExitCode.DONE
            assert ran.code == expected, f"{command}\n{ran.err}"
            if output.strip():
                assert [line.rstrip() for line in ran.out.rstrip().splitlines()] == output.rstrip().splitlines()


@pytest.mark.parametrize(
    "document",
    ["README.md", *(pytest.param(f"docs/{page}.md", marks=pytest.mark.slow) for page in ("report", "store"))],
)
def test_every_python_block_runs(document, workplace):
    found = blocks(document, "python")
    assert found
    for block in found:
        subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=workplace, check=True)


@pytest.mark.slow
def test_the_log_that_becomes_a_trace_names_the_slow_rank(workplace):
    """Rank 2 takes 375 ms for what takes 300: of a step of 5 + 375 + 20 ms, 75 are lost."""
    for block in blocks("docs/traces.md", "python"):
        subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=workplace, check=True)
    (command,) = blocks("docs/traces.md", "console")
    ran = run(*words(command), cwd=workplace)
    assert ran.code == 0, ran.err
    assert "rank 2 costs 19% of each step: computes 25% slower than its peers" in " ".join(ran.out.split())
    assert "75.0 ms of every 400.0 ms step" in ran.out


@pytest.mark.slow
def test_the_example_of_an_op_trace_runs_and_says_what_slows_it(workplace):
    """Rank 1 takes 160 ms where 130 ms is the mean: S = 190 / 160; as fast as rank 0 it saves 60 ms."""
    (block,) = (code for code in blocks("docs/traces.md", "python") if "OpTrace(" in code)
    ran = subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=workplace, check=True, capture_output=True)
    slowdown, saved = map(float, ran.stdout.split())
    assert slowdown == pytest.approx(190 / 160)
    assert saved == pytest.approx(0.06)


def test_links_between_documents_lead_somewhere():
    made_with_the_site = {"commands.md"}
    for document in DOCUMENTS:
        for target in set(re.findall(r"\]\(([^)#]+)", document.read_text())) - made_with_the_site:
            assert target.startswith("https://") or (document.parent / target).exists(), f"{document}: {target}"


def test_paths_that_documents_name_exist():
    """From the root or the document's folder; documents on the code name files and folders by their ends, too."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix not in ("", ".pyc")]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    paths = {f"{path}/" for file in files for path in file.parents} | set(map(str, files))
    on_code = {ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")}
    on_code |= {*ROOT.glob("*/README.md"), *ROOT.glob("docs/decisions/*.md")}
    from_the_root = re.compile(rf"(?<![\w./-])((?:{'|'.join(map(re.escape, FOLDERS))})/[a-z0-9_./*-]+\b)/?(?![\w*])")
    by_the_end = re.compile(r"`([\w./-]+(?:/|\.(?:c|css|h|js|md|png|py|pyi|sh|sql|toml|ya?ml)))`")
    missing = []
    for document in DOCUMENTS:
        text = document.read_text().partition("\n## [0")[0]  # of the changelog, what is not released yet
        for name in set(from_the_root.findall(text)):
            if not any(next(base.glob(name), None) for base in (ROOT, document.parent)):
                missing.append((document.name, name))
        for name in set(by_the_end.findall(text)) if document in on_code else ():
            # Folders are those below the document's; files stand anywhere.
            top = document.parent if name.endswith("/") else ROOT
            if not (ROOT / name).exists() and not any(path.endswith(f"/{name}") for path in paths if str(top) in path):
                missing.append((document.name, name))
    assert missing == []


def test_layers_in_documents_are_those_that_are_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = {
        contract["name"]: [set(layer.removeprefix("tracekit.").split(" | tracekit.")) for layer in contract["layers"]]
        for contract in contracts
    }

    def last(name):
        return [{module.rpartition(".")[2] for module in layer} for layer in checked[name]]

    # Below `analysis/job`, the analysis is one layer, where the first of its folders is.
    top, seen = [], set()
    for layer in checked["layers"]:
        shown = {"analysis/job" if module == "analysis.job" else module.partition(".")[0] for module in layer} - seen
        top += [shown] if shown - {"__main__"} else []
        seen |= shown
    for document, layers in {
        "ARCHITECTURE": top,
        "tracekit/README": top,
        "analysis/README": [{"job"}, *last("layers of the analysis")],
        "collectors/README": last("layers of the collectors"),
        "dashboards/README": last("layers of the dashboard"),
    }.items():
        text = (ROOT / f"{document}.md").read_text()
        (chain,) = re.findall(
            r"Layers(?:, from the top| import only what stands below them):(.*?)\.\n", text, re.DOTALL
        )
        assert [set(re.findall(r"`(.*?)`", layer)) for layer in chain.split(">")] == layers, document


def test_the_readme_takes_two_minutes():
    """Some 250 words a minute, without the table that is there to be looked up; the sample report is looked at, too."""
    prose = re.sub(r"^\|.*\n|```.*?```", "", README, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 500


def test_the_documents_show_every_command():
    shown = "\n".join(document.read_text() for document in DOCUMENTS)
    assert [name for name in COMMANDS if not re.search(rf"tracekit {name}\b", shown)] == []


def test_the_commands_of_the_readme_have_the_options_that_they_require():
    for line in re.findall(r"`tracekit (\w[^`]*)`", README):
        command = COMMANDS.get(line.split()[0])
        required = (
            [option for option in command.params if option.required and option.opts[0].startswith("--")]
            if command
            else []
        )
        assert [option.name for option in required if not set(option.opts) & set(line.split())] == [], line


def test_every_install_line_names_our_distributions():
    """On the package index, `tracekit` alone is a stranger's tool, with the same import and the same command."""
    kinds = {"", ".ipynb", ".md", ".py", ".toml", ".yaml", ".yml"}
    texts = [path for path in ROOT.iterdir() if path.suffix in kinds and not path.name.startswith(".")]
    texts += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    wrong = re.compile(
        r"pip3? install [^\n`]*?(?<![\w./-])tracekit(?![\w./-])"
        r'|dependencies = \["tracekit["\[ <>=]'
        r"|pypi\.org/project/tracekit/"
    )
    allowed = {"docs/limits.md", "tests/test_docs.py"}  # what to do about the stranger's; this test
    found = {
        path.relative_to(ROOT).as_posix(): hit[0]
        for path in texts
        if path.is_file() and (hit := wrong.search(path.read_text()))
    }
    assert {name: hit for name, hit in found.items() if name not in allowed} == {}
    assert wrong.search("pip install 'tracekit[dashboard]'")
    assert not wrong.search("pip install 'tracekit-analysis[dashboard]'")


def test_the_glossary_names_every_op_kind():
    from tracekit.trace.model import OpKind

    glossary = (ROOT / "docs" / "method.md").read_text()
    assert all(f"`{kind}`" in glossary for kind in OpKind)


#: The exit code of Python for an error of ours.
PYTHONS_OWN = 1


def test_every_exit_code_is_listed():
    scripts = (ROOT / "docs" / "scripts.md").read_text()
    table = scripts.partition("## Exit codes\n")[2].partition("| exit code |")[2].split("\n\n")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == sorted([PYTHONS_OWN, *ExitCode])
