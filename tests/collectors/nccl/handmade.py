"""Ring files with times chosen by hand; the plugin itself stamps host times nobody can predict."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tracekit.collectors.nccl import rings
from tracekit.collectors.nccl.rings import COLLECTIVE, KERNEL_CHANNEL, P2P, START, STATE

MS = 1_000_000
SLOTS_PER_LANE = 256


@dataclass
class HandmadeRing:
    """The ring of one process. Times in ms of the host's clock; `gpu_ahead_ns` is what the GPU's clock shows more."""

    host: str
    process: int
    gpu_ahead_ns: int = 0
    names: list[str] = field(default_factory=lambda: [""])
    communicators: list[tuple[int, int, int]] = field(default_factory=list)
    slots: list[dict] = field(default_factory=list)

    def communicator(self, identity: int, ranks: int, rank: int) -> int:
        self.communicators.append((identity, ranks, rank))
        return len(self.communicators) - 1

    def operation(self, communicator, function, sequence, enqueue, start, end, *, step=1, count=0, peer=-1, told=None):
        """An operation of one channel, with the kernel from `start` to `end` (None: never ended).

        `told`: when NCCL reported both; at once unless said.
        """
        is_transfer = function in ("Send", "Recv")
        number = P2P if is_transfer else COLLECTIVE
        values = {"first": count, "second": sequence, "peer": peer, "communicator": communicator, "channel": 1}
        texts = {"function": self._name(function), "data_type": self._name("ncclFloat32")}
        handle = self._slot(START, number, enqueue, step, **values, **texts)
        if start is None:
            return
        seen = start if told is None else told
        part = self._slot(START, KERNEL_CHANNEL, seen, step, first=handle, second=self._gpu(start))
        if end is not None:
            seen = end if told is None else told
            self._slot(STATE, KERNEL_CHANNEL, seen, step, handle=part, first=self._gpu(end))

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        header = np.zeros(1, rings._HEADER)
        one = header[0]
        one["magic"], one["version"] = rings.MAGIC, rings.VERSION
        one["slots_per_lane"], one["process"] = SLOTS_PER_LANE, self.process
        one["lane"]["written"][0] = len(self.slots)
        for number, (identity, ranks, rank) in enumerate(self.communicators):
            one["communicator"][number] = (1, ranks, rank, 0, identity, b"")
        one["name"]["text"][: len(self.names)] = [name.encode() for name in self.names]
        slots = np.zeros((32, SLOTS_PER_LANE), rings.SLOT)
        for at, values in enumerate(self.slots):
            for name, value in values.items():
                slots[0, at][name] = value
        path = directory / f"nccl-{self.host}-{self.process}.ring"
        path.write_bytes(header.tobytes() + slots.tobytes())
        return path

    def _slot(self, action, number, host_ms, step, **values) -> int:
        sequence = len(self.slots) + 1
        handle = values.pop("handle", sequence << 16 | 0x80 | number)
        known = {"sequence": sequence, "host_ns": round(host_ms * MS), "handle": handle, "step": step}
        self.slots.append({**known, "action": action, "number": number, **values})
        return handle

    def _name(self, text: str) -> int:
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def _gpu(self, host_ms: float) -> int:
        return round(host_ms * MS) + self.gpu_ahead_ns
