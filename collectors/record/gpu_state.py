"""Records which GPU a rank has, and samples its state during training.

In: torch's properties of the device and NVML. Out: a fact `device`, and samples of SM clock (MHz), temperature (C),
power (mW) and throttle reasons (bits). Without the library, there is only the fact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .nvml import Nvml
from .sampler import Sampler


class GpuState(Sampler):
    """Describes and samples one GPU. `tell` takes the fact `device`."""

    def __init__(self, path: Path, period_s: float, tell: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(path, period_s)
        self._tell = tell
        self._facts: dict[str, Any] = {}

    def describe(self, index: int) -> None:
        """Choose GPU `index` of this process. Raises what torch raises."""
        self._facts = device_facts(index)

    def reader(self) -> Callable[[], Sequence[int | None]] | None:
        """See `Sampler`."""
        try:
            nvml = Nvml()
            driver = nvml.driver_version()
        except (OSError, AttributeError):  # no library, no driver, or a library without a function needed here
            self._tell(self._facts)
            return None
        self._tell({**self._facts, "driver": driver})
        device = nvml.device(self._facts["uuid"], self._facts["pci_bus_id"])
        return None if device is None else partial(nvml.sample, device)


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
