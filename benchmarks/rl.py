"""Post-training: drawn jobs against the truth of an independent simulator, and the speed of a million trajectories."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.measure import measure, table, tracekit
from judges.rlsim import PLANTED, RlSimJob, alternatives, draw, generate, losses, record, step_s

SEEDS = 8
LARGE = (250, 4000, 16)
QUICK = {"SEEDS": 1, "LARGE": (4, 200, 4)}
#: A loss below this share of the step leads nothing.
WORTH = 0.05


def section() -> str:
    """The Markdown of this section."""
    return "\n\n".join(["## Post-training", _drawn(), _large()])


def report_of(job: RlSimJob, path: Path, scenarios: list[str]) -> Any:
    """What `tracekit rl` says about a job."""
    record(job, path)
    sizes = ["--gpus", f"rollout={len(job.speeds)},trainer={len(job.speeds)}", "--slots", str(job.slots)]
    what_if = [word for one in scenarios for word in ("--what-if", one)]
    done = subprocess.run(tracekit("rl", str(path), *sizes, *what_if, "--json"), capture_output=True, check=True)
    return json.loads(done.stdout)


def _drawn() -> str:
    rows = []
    for planted in PLANTED:
        worst: Counter[str] = Counter()
        right = priced = within = 0
        for seed in range(SEEDS):
            job = draw(planted, seed, staleness=seed % 2)
            truth, prices, step = losses(job), alternatives(job), step_s(job, generate(job))
            with tempfile.TemporaryDirectory() as folder:
                report = report_of(job, Path(folder) / "rl.jsonl", list(prices))
            leads = max(truth, key=lambda loss: truth[loss])
            right += report["leading"] == (leads if truth[leads] >= WORTH * step else None)
            lost_s = {one["loss"]: one["lost_s"] for one in report["losses"]}
            worst["step"] = max(worst["step"], abs(report["step_s"] / step - 1))
            worst["generation"] = max(worst["generation"], abs(report["generation"]["error"]))
            worst["losses"] = max([worst["losses"], *(abs(lost_s[loss] - lost) / step for loss, lost in truth.items())])
            for alternative in report["what_if"]:
                off = abs(alternative["step_s"] / prices[alternative["scenario"]] - 1)
                worst["prices"] = max(worst["prices"], off)
                priced, within = priced + 1, within + (off <= 0.05)
        errors = (f"{worst[key]:.2%}" for key in ("step", "generation", "losses", "prices"))
        rows.append([planted, f"{right} of {SEEDS}", *errors, f"{within} of {priced}"])
    head = ["planted", "leading loss right", "step", "generation", "losses", "prices", "prices within 5 %"]
    return (
        f"{SEEDS} drawn jobs per planted loss, every other one trained one step off. Largest error: of the step, of the"
        f" reproduced generation, of losses in the step, of priced steps.\n\n{table(head, rows)}"
    )


def _large() -> str:
    steps, size, engines = LARGE
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.jsonl"
        with path.open("w") as file:
            for step in range(steps):
                begun, lengths = 100.0 * step, [20 + (place * 7919 + step * 104729) % 2000 for place in range(size)]
                for place, tokens in enumerate(lengths):
                    line = {"trajectory": f"{step}-{place}", "step": step, "engine": place % engines, "submit": begun,
                            "start": begun, "end": begun + tokens * 0.02, "tokens": tokens}  # fmt: skip
                    file.write(f"{json.dumps(line)}\n")
                for phase, first, last in (("generate", 0.0, 40.5), ("train", 41.0, 99.0), ("sync", 99.0, 100.0)):
                    times = {"phase": phase, "step": step, "start": begun + first, "end": begun + last}
                    file.write(f"{json.dumps(times)}\n")
        cost = measure(*tracekit("rl", str(path), "--json"), runs=1, warm_up=0)
    return (
        f"`tracekit rl` on {steps * size:,} trajectories takes {cost.cpu_s:.1f} s of CPU time, {cost.wall_s:.1f} s in"
        f" all at a load of {os.getloadavg()[0]:.0f}, and {cost.peak_mb:.0f} MB."
    )
