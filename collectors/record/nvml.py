"""Bindings, through ctypes, for the parts of NVIDIA's management library that identify a GPU and report its state.

In: `libnvidia-ml.so.1`, if there is one. Out: the version of its driver, and samples of clock, temperature, power and
the reasons for throttling. pynvml would be one more package in the training environment.
"""

from __future__ import annotations

import ctypes

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
