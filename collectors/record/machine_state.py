"""Samples the state of what a rank runs on into files, at a low rate: its GPU, through NVML."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .host_state import Sampler


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


LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_CLOCK_SM = 1
_TEMPERATURE_GPU = 0
_VERSION_LENGTH = 80
#: The new and the old name of the same bits.
_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


class Nvml:
    """The library, initialized. Raises OSError if there is no library or no driver."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        if self._library.nvmlInit_v2() != _SUCCESS:
            raise OSError(f"{LIBRARY} finds no driver")

    def driver_version(self) -> str | None:
        """The version of the driver."""
        buffer = ctypes.create_string_buffer(_VERSION_LENGTH)
        done = self._library.nvmlSystemGetDriverVersion(buffer, ctypes.c_uint(_VERSION_LENGTH))
        return buffer.value.decode(errors="replace") if done == _SUCCESS else None

    def device(self, uuid: str | None, pci_bus_id: str | None) -> ctypes.c_void_p | None:
        """The GPU with that UUID, else with that PCI bus id; its CUDA number is meaningless here. None if unknown."""
        handle = ctypes.c_void_p()
        for function, name in (("nvmlDeviceGetHandleByUUID", uuid), ("nvmlDeviceGetHandleByPciBusId_v2", pci_bus_id)):
            if name and getattr(self._library, function)(name.encode(), ctypes.byref(handle)) == _SUCCESS:
                return handle
        return None

    def sample(self, device: ctypes.c_void_p) -> list[int | None]:
        """The state of the GPU now: SM clock, MHz; temperature, C; power, mW; bits of `nvmlClocksEventReasons`.

        None for values it does not report.
        """
        return [
            self._number("nvmlDeviceGetClockInfo", device, _CLOCK_SM),
            self._number("nvmlDeviceGetTemperature", device, _TEMPERATURE_GPU),
            self._number("nvmlDeviceGetPowerUsage", device),
            self._reasons(device),
        ]

    def _number(self, function: str, device: ctypes.c_void_p, *which: int) -> int | None:
        value = ctypes.c_uint()
        arguments = [ctypes.c_int(one) for one in which]
        done = getattr(self._library, function)(device, *arguments, ctypes.byref(value))
        return value.value if done == _SUCCESS else None

    def _reasons(self, device: ctypes.c_void_p) -> int | None:
        value = ctypes.c_ulonglong()
        for function in _REASONS:
            call = getattr(self._library, function, None)
            if call is not None and call(device, ctypes.byref(value)) == _SUCCESS:
                return value.value
        return None
