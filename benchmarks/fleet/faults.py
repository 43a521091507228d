"""Workers and drivers killed at random moments: the study must come out the same."""

import os
import random
import shutil
import signal
import subprocess
import time

from benchmarks.fleet.common import KEPT, descendants, first_jobs, fleet_run, said, tables

JOBS, WORKER_KILLS, DRIVER_KILLS = 100, 20, 5
#: Longest time from one kill to the next: some jobs are done in between.
_LONGEST_S = 8.0


def section() -> str:
    """Two studies of the same jobs, one of them by processes that are killed."""
    jobs, calm, hit = first_jobs(JOBS), KEPT / "calm", KEPT / "hit"
    for study in (calm, hit):
        shutil.rmtree(study, ignore_errors=True)
    subprocess.run(fleet_run(jobs, calm), check=True, capture_output=True)
    seed = random.SystemRandom().randrange(2**32)
    chosen = random.Random(seed)
    workers = drivers = rounds = 0
    while workers < WORKER_KILLS or drivers < DRIVER_KILLS:
        rounds += 1
        process = subprocess.Popen(fleet_run(jobs, hit), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(chosen.randint(2, 6)):
            time.sleep(chosen.uniform(0, _LONGEST_S))
            below = descendants(process.pid)[1:]
            if below and process.poll() is None:
                os.kill(chosen.choice(below), signal.SIGKILL)
                workers += 1
        if process.poll() is None:
            process.kill()
            drivers += 1
        if process.wait() == 0:  # it got to its end: begin anew
            shutil.rmtree(hit)
        said(f"{workers} workers and {drivers} drivers killed")
    for _ in range(2):  # a trace whose process was killed twice is tried again
        subprocess.run(fleet_run(jobs, hit), check=True, capture_output=True)
    same = tables(hit) == tables(calm)
    assert same, "the studies differ"
    return (
        "## Fleets: killed processes\n\n"
        f"A run over {JOBS} jobs with 2 processes, begun {rounds} times: {workers} times a worker and {drivers} times"
        f" the driver were killed at random moments (SIGKILL, seed {seed}). Then the study was the same as that of a"
        " run that nothing disturbed, byte for byte."
    )
