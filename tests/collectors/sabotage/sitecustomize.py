"""A user's sitecustomize, run behind the one of `tracekit collect`: says so, and breaks what SABOTAGE names.

hooks: every hook's body raises. disk: the recorder's segments refuse to be written. manifest: at the end there is a
link to nowhere in its place. renamed: a torch that has no longer what the hooks hold on to. driverless: a torch built
for CUDA on a machine without a driver.
"""

import atexit
import os
import runpy
import sys
from pathlib import Path

with open(os.environ["SITECUSTOMIZE_SAYS"], "a") as file:
    file.write(f"{os.getpid()}\n")

if "_tracekit_recorder.collectors.record.bootstrap" in sys.modules:
    from _tracekit_recorder.collectors.record import bootstrap

    start = bootstrap._start

    def sabotaged(rank, world_size):
        session = start(rank, world_size)
        if session is not None and os.environ.get("SABOTAGE") == "hooks":

            def broken(*args, **kwargs):
                raise LookupError("sabotage")

            for name in (
                "begin_op",
                "name",
                "record",
                "record_compute",
                "hold",
                "flush_held",
                "optimizer_begins",
                "optimizer_ended",
            ):
                setattr(session, name, broken)
        if session is not None and os.environ.get("SABOTAGE") == "disk":

            def full():
                raise OSError(28, "No space left on device")

            session.recorder._open_segment = full
        return session

    bootstrap._start = sabotaged

    def plant():
        attempt = f"attempt-{int(os.environ['TORCHELASTIC_RESTART_COUNT']):03d}"
        Path(os.environ["TRACEKIT_COLLECT_DIR"], attempt, "manifest.json").symlink_to("nowhere")

    if os.environ.get("SABOTAGE") == "manifest":
        atexit.register(plant)

    def rename(dataloader):
        dataloader._BaseIterator = dataloader._BaseDataLoaderIter
        del dataloader._BaseDataLoaderIter

    def without_driver(torch):
        def raises(*args, **kwargs):
            raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU.")

        torch.version.cuda = "13.0"
        torch._C._cuda_getDeviceCount = lambda: 0
        torch._C._cuda_isCurrentStreamCapturing = raises
        torch.cuda.graphs._cuda_isCurrentStreamCapturing = raises

        def missing(name):
            if name.startswith("_cuda_"):
                return raises
            raise AttributeError(name)

        torch._C.__getattr__ = missing

    if os.environ.get("SABOTAGE") == "renamed":
        bootstrap.on_import("torch.utils.data.dataloader", rename)
    if os.environ.get("SABOTAGE") == "driverless":
        bootstrap.on_import("torch", without_driver)

if os.environ.get("SABOTAGE"):
    runpy.run_path(str(Path(__file__).with_name("faults.py")))["sabotage"](os.environ["SABOTAGE"])
