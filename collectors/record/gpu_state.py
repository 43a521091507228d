"""Record which GPU a rank has, and sample its state during training at a low rate into a separate file.

In: torch's properties of the device and NVML. Out: a fact `device`, and JSON lines of host time (ns), SM clock (MHz),
temperature (C), power (mW) and throttle reasons (bits). A separate thread does this, because a call into the
driver of a faulty GPU can take seconds, too long for a hook or the writer. Without the library, there is only the fact.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .nvml import Nvml
from .small_file import create

#: Maximum number of samples: one every 2 s for a day.
SAMPLE_LIMIT = 43_200
#: How long to wait for the thread when the process ends, seconds.
CLOSE_TIMEOUT_S = 0.5


class GpuState:
    """Describes and samples one GPU. `tell` takes the fact `device`; `path` gets the samples; the first creates it."""

    def __init__(self, path: Path, period_s: float, tell: Callable[[dict[str, Any]], None]) -> None:
        self._path, self._period_s, self._tell = path, period_s, tell
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, index: int) -> None:
        """Describe GPU `index` of this process and begin to sample it."""
        facts = device_facts(index)
        self._thread = threading.Thread(target=self._run, args=(facts,), name="tracekit-gpu", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self, facts: dict[str, Any]) -> None:
        try:
            nvml = Nvml()
            driver = nvml.driver_version()
        except (OSError, AttributeError):  # no library, no driver, or a library without a function needed here
            self._tell(facts)
            return
        self._tell({**facts, "driver": driver})
        with contextlib.suppress(OSError, AttributeError):  # the disk or the library fails: no more samples
            device = nvml.device(facts["uuid"], facts["pci_bus_id"])
            if device is not None:
                self._sample(nvml, device)
            nvml.close()

    def _sample(self, nvml: Nvml, device: Any) -> None:
        with create(self._path) as file:
            for _ in range(SAMPLE_LIMIT):
                state = nvml.sample(device)
                file.write(f"{json.dumps([time.monotonic_ns(), *state])}\n".encode())
                if self._over.wait(self._period_s):
                    return


def device_facts(index: int) -> dict[str, Any]:
    """Facts of torch about a GPU in use; None for values that this version of torch does not have."""
    properties = torch.cuda.get_device_properties(index)
    uuid, bus = getattr(properties, "uuid", None), getattr(properties, "pci_bus_id", None)
    return {
        "index": index,
        "model": getattr(properties, "name", None),
        "uuid": None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}",
        "pci_bus_id": None if bus is None else _pci_bus_id(properties),
        "memory_bytes": getattr(properties, "total_memory", None),
        "cuda": torch.version.cuda or getattr(torch.version, "hip", None),
        "nccl": None if (version := nccl_version()) is None else ".".join(map(str, version)),
    }


def _pci_bus_id(properties: Any) -> str:
    """The PCI bus id in the format of NVML and DCGM."""
    domain, device = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
    return f"{domain:08X}:{properties.pci_bus_id:02X}:{device:02X}.0"


def nccl_version() -> list[int] | None:
    """The version of NCCL that torch is linked with; None if it was built without."""
    try:
        return [int(part) for part in torch.cuda.nccl.version()]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
