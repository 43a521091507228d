"""Make the pictures of experiment trackers in docs/live.md: `python docs/tracker_screenshots.py [MLFLOW]`.

In: twelve simulated windows of a job, of which a rank is slow in five. Out: docs/images/tensorboard.png and, with the
path of an MLflow that has its user interface, docs/images/mlflow.png.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from mlflow import MlflowClient
from playwright.sync_api import Error, Page, sync_playwright

from tracekit.dashboards.trackers import opened, series
from tracekit.report.report import Report
from tracekit.sources.load import load

IMAGES, JOB, STEPS = Path(__file__).parent / "images", "llama-70b", 10
TAGS = "excess_ms|lost_gpu_hours|slowdown|slowest_rank|step_s|straggler_ms"
#: Ports of the two user interfaces.
TENSORBOARD, MLFLOW = 16006, 16007


def main() -> None:
    """Log the windows, start the user interfaces, and take their pictures."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        trackers = {f"tensorboard:{folder / 'runs'}": _tensorboard}
        commands = [[_beside("tensorboard"), "--logdir", str(folder / "runs"), "--port", str(TENSORBOARD)]]
        if sys.argv[1:]:
            database = f"sqlite:///{folder / 'mlflow.db'}"
            trackers[f"mlflow:{database}"] = _mlflow
            commands.append([sys.argv[1], "ui", "--backend-store-uri", database, "--port", str(MLFLOW)])
        reports = [_report(folder, number) for number in range(12)]
        for where in trackers:
            tracker = opened(where, JOB)
            for number, report in enumerate(reports):
                tracker.log(series(report), STEPS * (number + 1))
            tracker.close()
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium-headless-shell", args=["--no-sandbox", "--disable-gpu"]
        )
        for command, picture in zip(commands, trackers.values(), strict=True):
            with subprocess.Popen(command) as server:
                page = browser.new_page(viewport={"width": 1280, "height": 800})
                page.set_default_timeout(150_000)
                picture(page)
                server.terminate()
        browser.close()


def _report(folder: Path, number: int) -> Report:
    """The report on a window; a rank is slow in windows 5 to 9."""
    path = folder / f"{number}.parquet"
    cause = ["--cause", "slow-worker:dp=1,pp=2,factor=1.5"] if 5 <= number < 10 else []
    words = ["synth", "--out", str(path), "--steps", str(STEPS), "--seed", str(number), "--name", JOB, *cause]
    subprocess.run([_beside("tracekit"), *words], check=True)
    return load(path).whatif()


def _tensorboard(page: Page) -> None:
    _open(page, f"http://localhost:{TENSORBOARD}/?smoothing=0&tagFilter=({TAGS})#timeseries")
    page.get_by_text("Enable step selection and data table").click()
    page.get_by_role("button", name="Settings").first.click()
    page.wait_for_timeout(6000)
    page.screenshot(path=IMAGES / "tensorboard.png")


def _mlflow(page: Page) -> None:
    (run,) = MlflowClient(f"http://localhost:{MLFLOW}").search_runs(["1"])
    address = f"http://localhost:{MLFLOW}/#/experiments/1/runs/{run.info.run_id}/model-metrics"
    page.set_viewport_size({"width": 1280, "height": 900})
    _open(page, address)
    page.get_by_text("tracekit/slowdown").first.wait_for()
    page.wait_for_timeout(8000)
    page.screenshot(path=IMAGES / "mlflow.png", clip={"x": 198, "y": 0, "width": 748, "height": 892})


def _open(page: Page, address: str) -> None:
    """Open a page as soon as its server answers."""
    for _ in range(60):
        try:
            page.goto(address, wait_until="domcontentloaded")
            break
        except Error:  # the server is not there yet
            page.wait_for_timeout(3000)


def _beside(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


if __name__ == "__main__":
    main()
