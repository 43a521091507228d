"""Samples the state of what a rank runs on into files, at a low rate: its GPU, through NVML, and its host."""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .small_file import create, write_all

#: Reads a sample: a number for each quantity, None if it is not counted.
Read = Callable[[], Sequence["int | None"]]
#: Maximum number of samples: one every 2 s for a day.
SAMPLE_LIMIT = 43_200
#: How long to wait for the thread when the process ends, seconds.
CLOSE_TIMEOUT_S = 0.5


class Sampler:
    """Samples every `period_s` seconds into the file `path`, which the first sample creates.

    Its thread is its own: what it reads can hang, such as the driver of a faulty GPU. `prepare`: called on that thread;
    returns None if there is nothing to read.
    """

    def __init__(self, path: Path, period_s: float, prepare: Callable[[], Read | None]) -> None:
        self._path, self._period_s, self._prepare = path, period_s, prepare
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin to sample."""
        self._thread = threading.Thread(target=self._run, name=f"tracekit{self._path.suffix}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # whatever a kernel, a library or a disk does: no more samples
            read = self._prepare()
            if read is None:
                return
            with create(self._path) as file:
                for _ in range(SAMPLE_LIMIT):
                    write_all(file, f"{json.dumps([time.monotonic_ns(), *read()])}\n".encode())
                    if self._over.wait(self._period_s):
                        return


def gpu_reader(facts: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> Read | None:
    """A function that samples the GPU. `tell` is called with its `device_facts`, and the driver's version if known."""
    try:
        nvml = Nvml()
        driver = nvml.driver_version()
    except (OSError, AttributeError):  # no library, no driver, or a library without a function needed here
        tell(facts)
        return None
    tell({**facts, "driver": driver})
    device = nvml.device(facts["uuid"], facts["pci_bus_id"])
    return None if device is None else partial(nvml.sample, device)


def device_facts(index: int) -> dict[str, Any]:
    """Facts of torch about a GPU in use; None for values that this version of torch does not have."""
    import torch  # counters of the host are read without it

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
    import torch

    try:
        return [int(part) for part in torch.cuda.nccl.version()]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


#: What processes wait for, in the order of a sample, which ends with the throttled time.
RESOURCES = ("cpu", "io", "memory")
_HOST_PRESSURE = Path("/proc/pressure")


def host_reader(tell: Callable[[dict[str, Any]], None]) -> Read | None:
    """A function that samples this process's cgroup, or its host. `tell` is called with which of them."""
    folders = list(cgroup_folders())
    limited = _first_with("cpu.stat", throttled_us, folders)
    pressed = _first_with("cpu.pressure", waited_us, folders)
    files = [_HOST_PRESSURE / resource for resource in RESOURCES]
    if pressed is not None:
        files = [pressed / f"{resource}.pressure" for resource in RESOURCES]
    counters = [_counter(file, waited_us) for file in files]
    counters.append(None if limited is None else _counter(limited / "cpu.stat", throttled_us))
    if not any(counters):
        return None
    tell({"pressure": _identity(pressed), "limit": _identity(limited)})
    return lambda: [None if counter is None else counter() for counter in counters]


def cgroup_folders() -> Iterator[Path]:
    """Where files of this process's cgroups can be: of version 2, then of the CPU controller of version 1.

    A container may see its own cgroup as the root of the mount.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in Path("/proc/self/mountinfo").read_text().splitlines():
            where, _, what = mount.partition(" - ")
            _, _, _, root, point, *_ = where.split(" ")
            kind, _, options = what.split(" ", 2)
            if kind == ("cgroup" if controllers else "cgroup2") and (not controllers or "cpu" in options.split(",")):
                inside = group[len(root) :] if group.startswith(root) else group
                yield Path(point, inside.lstrip("/"))
                yield Path(point)


def waited_us(pressure: str) -> int:
    """Time in which at least one process waited, us. Raises ValueError or LookupError."""
    return int(pressure.split("total=", 1)[1].split(maxsplit=1)[0])


def throttled_us(cpu_stat: str) -> int:
    """Time for which a CPU limit throttled processes, us. Raises ValueError or LookupError if there is no limit."""
    values = dict(line.split() for line in cpu_stat.splitlines())
    return int(values["throttled_usec"]) if "throttled_usec" in values else int(values["throttled_time"]) // 1000


def _first_with(name: str, total: Callable[[str], int], folders: Sequence[Path]) -> Path | None:
    """The first folder with a file that has such a total."""
    return next((folder for folder in folders if _counter(folder / name, total) is not None), None)


def _counter(path: Path, total: Callable[[str], int]) -> Callable[[], int | None] | None:
    """A function that reads a total from a kernel file each time it is called; None if the file lacks it."""

    def count() -> int | None:
        try:
            return total(path.read_text())
        except (OSError, ValueError, LookupError):  # the cgroup is gone, or the kernel does not count
            return None

    return None if count() is None else count


def _identity(folder: Path | None) -> str | None:
    """The identity of a cgroup on its host; None for the whole host."""
    if folder is None:
        return None
    status = folder.stat()
    return f"{status.st_dev}:{status.st_ino}"


LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_CLOCK_SM = 1
_TEMPERATURE_GPU = 0
_VERSION_LENGTH = 80
#: The new and the old name of the same bits.
_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


class Nvml:
    """The library, initialized; pynvml would be one more package of the training. Raises OSError if there is no library
    or no driver.
    """

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
        arguments = [ctypes.c_int(argument) for argument in which]
        done = getattr(self._library, function)(device, *arguments, ctypes.byref(value))
        return value.value if done == _SUCCESS else None

    def _reasons(self, device: ctypes.c_void_p) -> int | None:
        value = ctypes.c_ulonglong()
        for function in _REASONS:
            call = getattr(self._library, function, None)
            if call is not None and call(device, ctypes.byref(value)) == _SUCCESS:
                return value.value
        return None
