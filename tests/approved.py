"""What tracekit shows of small jobs, whole: `python -m tests.approved` writes it into tests/approved/, a file per case.

A change of the code that changes what somebody sees changes one of these files: read the difference before you commit
it. Numbers have six digits, to be the same on every machine.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
from plotly.utils import PlotlyJSONEncoder

import tracekit
from judges.hangsim import Fault, HangJob, dumps, write
from judges.hangsim import run as hang
from tests.analysis.metrics.fleet import BEGAN, fleet
from tests.analysis.metrics.fleet import Fault as Slowed
from tests.analysis.plans.simulator import draw
from tests.analysis.rl.logs import lines
from tests.analysis.rl.logs import write as write_rows
from tests.bill.test_run import restarted
from tests.dashboards.page_text import Pages
from tests.handmade import LAYOUT, healthy_frame, run, slow_frame, slow_trace
from tests.test_one_world import HOSTS, op_trace
from tests.test_sentences import JOBS
from tracekit.analysis.diagnosis.diagnosis import Diagnosis
from tracekit.report.report import Report

SAMPLES = Path(__file__).parents[1] / "sample_traces"
APPROVED = Path(__file__).parent / "approved"
STORE = "jobs.store"
#: What is another one in each run: when the store was written, and the state of its file.
OF_THIS_RUN = re.compile(r'20\d\d-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?|(?<=data-state=")[-\d]+')
SCRIPT = re.compile(r"(<(script|style)\b[^>]*>).*?(</\2>)", re.DOTALL)
FLOAT = re.compile(r"-?\d+\.\d+(e-?\d+)?")
FIX = ("--fix", "worker=1,0", "--keep", "stage=0", "--by", "host", "--by", "kind")

ON_OTHER_GPUS = ("--gpu", "H200", "--gpu", "H100 on rank=0", "--gpu-from", "H100", "--precision", "bf16")
#: Case -> the words of a command, in a folder that `fill` filled.
COMMANDS: dict[str, Sequence[str]] = {
    **{f"report-{path.stem}": ("whatif", path.name, "--json") for path in sorted(SAMPLES.glob("*.parquet"))},
    "report-recording": ("whatif", "gpu_slow_input", "--json", "--overlap", "--fix", "rank=1", "--by", "name"),
    "report-slow": ("whatif", "slow.parquet", "--json", *FIX),
    "report-ops": ("whatif", "ops.parquet", "--json", "--fix", "rank=1", "--by", "host"),
    "report-post-training": ("whatif", "rl.jsonl", "--json", "--fix", "fix=instant-sync"),
    "report-published-rules": ("whatif", "slow_worker.parquet", "--json", "--method", "published"),
    "report-bubbles": ("whatif", "slow.parquet", "--json", "--bubbles", "--schedule", "gpipe"),
    "full-slow": ("whatif", "slow.parquet", "--full", "--gpu-hour", "2.5", *FIX),
    "full-late-clock": ("whatif", "late.parquet", "--full"),
    "full-late-clock-published": ("whatif", "late.parquet", "--full", "--method", "published"),
    "full-lengths": ("whatif", "sequence_lengths.parquet", "--full"),
    "full-collected": ("whatif", "collected.parquet", "--full"),
    "full-recording": ("whatif", "gpu_slow_input", "--full", "--overlap"),
    "full-ops": ("whatif", "ops.parquet", "--full"),
    "full-post-training": ("whatif", "rl.jsonl", "--full"),
    "full-bubbles": (
        *("whatif", "slow_last_stage.parquet", "--full", "--bubbles", "--layers", "9,9,9,5"),
        *("--schedule", "gpipe", "--schedule", "interleaved:chunks=2", "--schedule", "zb-h1,weight=0.4"),
    ),
    "hardware-recording": ("whatif", "gpu_slow_input", "--full", *ON_OTHER_GPUS),
    "hardware-recording-json": ("whatif", "gpu_slow_input", "--json", *ON_OTHER_GPUS),
    "hardware-slow": ("whatif", "slow_worker.parquet", "--full", "--gpu", "H200", "--gpu-from", "H100"),
    "redacted": ("whatif", "slow_worker.parquet", "--full", "--redact"),
    "culprits-slurm": ("culprits", "slow_worker.parquet", "--format", "slurm", "--suspects"),
    "explain-gc": ("whatif", "python_gc.parquet", "--explain"),
    "explain-recording": ("whatif", "gpu_slow_input", "--explain"),
    "markdown-collected": ("whatif", "collected.parquet", "--markdown", "-"),
    **{
        f"html-{name}": ("whatif", path, "--html", "out/page.html")
        for name, path in (
            ("slow", "slow.parquet"),
            ("collected", "collected.parquet"),
            ("recording", "gpu_slow_input"),
        )
    },
    "csv-slow": ("whatif", "slow.parquet", "--csv", "out"),
    "csv-recording": ("whatif", "gpu_slow_input", "--csv", "out"),
    "rl": ("rl", "rl.jsonl", "--what-if", "engines=2", "--what-if", "longest-first", "--html", "out/page.html"),
    "metrics-doctor": ("metrics", "doctor", "metrics.parquet"),
    "metrics-scan": ("metrics", "scan", "metrics.parquet"),
    "metrics-test": (
        *("metrics", "test", "metrics.parquet", "--suspect"),
        f"node-00:part=compute,excess=0.3,from={BEGAN + 300},to={BEGAN + 540}",
    ),
    "compare": ("compare", "healthy.parquet", "slow_worker.parquet"),
    "compare-json": ("compare", "collected_healthy.parquet", "collected.parquet", "--json"),
    "gate": ("gate", "slow_worker.parquet", "--baseline", "healthy.parquet", "--noise", "1%"),
    "culprits": ("culprits", "slow_worker.parquet", "--format", "json", "--suspects"),
    "bill": ("bill", "run", "--gpu-hour", "2"),
    "bill-json": ("bill", "run", "--gpu-hour", "2", "--json"),
    "hang": ("hang", "dumps"),
    "hang-json": ("hang", "dumps", "--json"),
    "experts": ("experts", "loads.jsonl", "--ranks", "2", "--replicas", "6"),
    "optimize": ("optimize", "--model", "model.json"),
    "optimize-json": ("optimize", "--model", "model.json", "--json"),
    "optimize-runs": ("optimize", "--runs", "runs.csv", "--microbatches", "48"),
    "store-list": ("store", "list", "--store", STORE),
    "store-list-trace": ("store", "list", "slow_worker.parquet"),
}
#: Case -> a page and what its address says, over the store.
PAGES: dict[str, tuple[str, dict[str, str]]] = {
    "page-jobs": ("/", {}),
    "page-jobs-filtered": ("/", {"q": "slow", "sort": "slowdown"}),
    "page-hosts": ("/hosts", {}),
    **{
        f"page{path.replace('/', '-')}-{name}": (path, {"job": job, **state})
        for name, job, pages in (
            ("slow", "slow job", ("/job", "/workers", "/time", "/timeline", "/pipeline", "/whatif")),
            ("ops", "ops", ("/job", "/time", "/timeline", "/whatif")),
            ("recording", "gpu_slow_input", ("/job", "/timeline", "/whatif")),
            ("post-training", "rl.jsonl", ("/job",)),
            ("lengths", "sequence-lengths", ("/job", "/workers", "/time", "/pipeline")),
        )
        for path in pages
        for state in ({},)
    },
    "page-workers-step": ("/workers", {"job": "slow job", "step": "2", "worker": "1,0", "host": "n0"}),
    "page-compare": ("/compare", {"job": "slow job", "with": "healthy"}),
    "page-compare-split": ("/compare", {"job": "sequence-lengths", "split": "6"}),
    "page-whatif-asked": ("/whatif", {"job": "slow job", "select": "worker=1,0"}),
}
#: Case -> a small job with one cause: its answer and findings.
FINDINGS = {f"findings-{job.replace(' ', '-')}": job for job in JOBS}
CASES = (*COMMANDS, *PAGES, *FINDINGS)


def fill(folder: Path) -> None:
    """Write the jobs, the store and what else the cases read."""
    for path in SAMPLES.iterdir():
        (folder / path.name).symlink_to(path)
    slow_trace(range(5), metadata={"hosts": HOSTS}).write_parquet(folder / "slow.parquet")
    well = tracekit.Trace.from_frame(healthy_frame(range(5)), LAYOUT, name="healthy", metadata={"hosts": HOSTS})
    well.write_parquet(folder / "well.parquet")
    last = (pl.col("dp_rank") == 1) & (pl.col("pp_rank") == 1)
    behind = slow_frame(range(5)).with_columns(start=pl.col("start") - pl.when(last).then(0.3).otherwise(0.0))
    tracekit.Trace.from_frame(behind, LAYOUT, name="late clock").write_parquet(folder / "late.parquet")
    op_trace(0.16, "ops").write_parquet(folder / "ops.parquet")
    write_rows(folder / "rl.jsonl", lines(8, reward_s=0.125))
    job, faults = HangJob(4, 2, 2), [Fault("gpu-error", 6, 29, lag=4)]
    write(folder / "dumps", dumps(job, faults, hang(job, faults)))
    restarted(folder / "run")
    fleet(1, Slowed(0, "compute", 0.3, 300, 540), hosts=8, devices=1).write_parquet(folder / "metrics.parquet")
    (folder / "loads.jsonl").write_text('{"step": 0, "layer": 0, "tokens_per_expert": [8, 1, 1, 1]}\n')
    (folder / "model.json").write_text(json.dumps(draw(1, layers=6, stages=2, memory=1.2)))
    (folder / "runs.csv").write_text("microbatches,step_time_s\n24,5.17\n288,55.1\n")
    with chdir(folder):
        jobs = ("slow.parquet", "well.parquet", "ops.parquet", "rl.jsonl", "gpu_slow_input", "sequence_lengths.parquet")
        ran = run("import", *jobs, "--store", STORE)
        assert ran.code == 0, ran.err


def shown(case: str, folder: Path) -> str:
    """What the case shows, in the filled folder."""
    if case in FINDINGS:
        return _diagnosed(FINDINGS[case])
    return OF_THIS_RUN.sub("TIME", _page(case, folder) if case in PAGES else _printed(case, folder))


def _diagnosed(job: str) -> str:
    match JOBS[job]():
        case Report() as report:
            whole = json.loads(msgspec.json.encode(report))
            parts = {key: whole[key] for key in ("answer", "verdict", "causes", "fixes")}
        case Diagnosis(answer=answer, causes=causes):
            parts = {"answer": answer, "causes": causes}
        case findings:
            parts = {"causes": [*findings]}
    whole = json.loads(msgspec.json.encode(parts, enc_hook=_summed_up))
    for cause in whole["causes"]:
        cause.pop("change", None)  # of the replay: what a reader sees of it is the price
    return json.dumps(_rounded(whole), indent=1, ensure_ascii=False)


def _summed_up(value: Any) -> str:
    return f"{value.shape} array, sum {value.sum():.6g}" if isinstance(value, np.ndarray) else type(value).__name__


def _printed(case: str, folder: Path) -> str:
    written = folder / "out"
    written.mkdir()
    ran = run(*COMMANDS[case], cwd=folder)
    text = ran.out.replace(str(folder), "FOLDER")
    if text.startswith("{"):
        text = json.dumps(_rounded(json.loads(text)), indent=1, ensure_ascii=False)
    files = "".join(f"\n{path.name}\n{_shortened(path)}" for path in sorted(written.iterdir()))
    shutil.rmtree(written)
    return f"{text.rstrip()}\nexit code {ran.code}\n{ran.err.rstrip()}{files}".rstrip()


def _shortened(path: Path) -> str:
    """The text of a file; of a page, without its scripts and styles, an element a line."""
    text = path.read_text("utf-8")
    if path.suffix == ".html":
        return re.sub(r"(?<=>)(?=<)", "\n", SCRIPT.sub(r"\1\3", text))
    return FLOAT.sub(lambda number: f"{float(number[0]):.6g}", text)


def _page(case: str, folder: Path) -> str:
    path, state = PAGES[case]
    component = _pages(folder).page(path, **state)
    return "\n".join(_outline(json.loads(json.dumps(component, cls=PlotlyJSONEncoder))))


_APPS: dict[Path, Pages] = {}


def _pages(folder: Path) -> Pages:
    return _APPS.setdefault(folder, Pages(folder / STORE))


def _outline(part: Any, depth: int = 0) -> Iterator[str]:
    """A component with its attributes on a line, and those in it below, indented."""
    if isinstance(part, list):
        for inner in part:
            yield from _outline(inner, depth)
    elif isinstance(part, dict) and {"props", "type"} <= part.keys():
        props = dict(part["props"])
        children = props.pop("children", None)
        yield " " * depth + " ".join(
            [part["type"], *(f"{key}={_compact(value)}" for key, value in sorted(props.items()))]
        )
        yield from _outline(children, depth + 1)
    elif part is not None:
        yield " " * depth + _compact(part)


def _compact(value: Any) -> str:
    return json.dumps(_rounded(value), ensure_ascii=False, separators=(",", ":"))


def _rounded(value: Any) -> Any:
    """The same data with floats of six digits, and arrays as lists."""
    if isinstance(value, dict) and value.keys() >= {"bdata", "dtype"}:
        array = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
        return _rounded(array.tolist())
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) > 1e-9 else 0.0
    return value


def main() -> None:
    """Write what is shown now."""
    for path in APPROVED.glob("*.txt"):
        path.unlink()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        fill(folder)
        for case in CASES:
            (APPROVED / f"{case}.txt").write_text(shown(case, folder) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
