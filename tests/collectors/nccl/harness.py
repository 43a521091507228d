"""Plays NCCL's part: loads the plugin and calls it through its tables of functions.

The structures follow NCCL's own headers, version by version, and share nothing with the plugin's. Everything that owns
memory stays alive as long as the harness, as NCCL's literals do.
"""

import ctypes
import json
import os
import subprocess
import sys
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p

COLL, P2P, PROXY_OP, PROXY_STEP, KERNEL_CH = 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 6
GROUP, GROUP_API, COLL_API = 1 << 0, 1 << 8, 1 << 9
KERNEL_CH_STOP = 22
VERSIONS = (4, 5, 6, 7)


def fields(name, *members):
    return type(name, (ctypes.Structure,), {"_fields_": list(members)})


def coll(version):
    """The collective's part of a description: version 5 appended the group, version 7 three more."""
    members = [
        ("seqNumber", c_uint64),
        ("func", c_char_p),
        ("sendBuff", c_void_p),
        ("recvBuff", c_void_p),
        ("count", c_size_t),
        ("root", c_int),
        ("datatype", c_char_p),
        ("nChannels", c_uint8),
        ("nWarps", c_uint8),
        ("algo", c_char_p),
        ("proto", c_char_p),
    ]
    if version >= 5:
        members.append(("parentGroup", c_void_p))
    if version >= 7:
        members += [("kernelVariant", c_char_p), ("isSymColl", ctypes.c_bool), ("userTag", c_uint64)]
    return fields(f"Coll{version}", *members)


def p2p(version):
    members = [
        ("func", c_char_p),
        ("buff", c_void_p),
        ("datatype", c_char_p),
        ("count", c_size_t),
        ("peer", c_int),
        ("nChannels", c_uint8),
    ]
    if version >= 5:
        members.append(("parentGroup", c_void_p))
    if version >= 7:
        members.append(("userTag", c_uint64))
    return fields(f"P2p{version}", *members)


ProxyOp = fields(
    "ProxyOp",
    ("pid", c_int),
    ("channelId", c_uint8),
    ("peer", c_int),
    ("nSteps", c_int),
    ("chunkSize", c_int),
    ("isSend", c_int),
)
ProxyStep = fields("ProxyStep", ("step", c_int))
KernelCh = fields("KernelCh", ("channelId", c_uint8), ("pTimer", c_uint64))
CopyColl = fields(
    "CopyColl",
    ("seqNumber", c_uint64),
    ("func", c_char_p),
    ("sendBuff", c_void_p),
    ("recvBuff", c_void_p),
    ("count", c_size_t),
    ("root", c_int),
    ("datatype", c_char_p),
    ("syncStrategy", c_char_p),
    ("intraBatchSync", ctypes.c_bool),
    ("batchSize", c_uint32),
    ("numBatches", c_uint32),
    ("ceSeqNum", c_uint32),
    ("stream", c_void_p),
)


def description(version):
    """The event description of an interface version."""
    members = [("coll", coll(version)), ("p2p", p2p(version)), ("proxyOp", ProxyOp), ("proxyStep", ProxyStep)]
    members.append(("kernelCh", KernelCh))
    if version >= 6:
        members.append(("ceColl", CopyColl))
    union = type(f"Union{version}", (ctypes.Union,), {"_fields_": members})
    kind = c_uint8 if version == 4 else c_uint64
    return fields(f"Description{version}", ("type", kind), ("parentObj", c_void_p), ("rank", c_int), ("u", union))


class StateArguments(ctypes.Union):
    _fields_ = (("transSize", c_size_t), ("appendedProxyOps", c_int), ("pTimer", c_uint64))


def table(version, descr):
    init = (
        CFUNCTYPE(c_int, POINTER(c_void_p), POINTER(c_int), c_char_p, c_uint64, c_int, c_int, c_int, c_void_p)
        if version == 4
        else CFUNCTYPE(c_int, POINTER(c_void_p), c_uint64, POINTER(c_int), c_char_p, c_int, c_int, c_int, c_void_p)
    )
    return fields(
        f"Table{version}",
        ("name", c_char_p),
        ("init", init),
        ("startEvent", CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), POINTER(descr))),
        ("stopEvent", CFUNCTYPE(c_int, c_void_p)),
        ("recordEventState", CFUNCTYPE(c_int, c_void_p, c_int, POINTER(StateArguments))),
        ("finalize", CFUNCTYPE(c_int, c_void_p)),
    )


class Nccl:
    """One process's NCCL at an interface version. `mask` is the word NCCL reads before each operation."""

    def __init__(self, library, version):
        self.version = version
        self.library = ctypes.CDLL(str(library))
        self.Description = description(version)
        self.table = table(version, self.Description).in_dll(self.library, f"ncclProfiler_v{version}")
        self.mask = c_int(-1)
        self._literals = {}

    def literal(self, text):
        """One address per text for the life of the process, as C's literals have."""
        if text is None:
            return None
        buffer = self._literals.setdefault(text, ctypes.create_string_buffer(text.encode()))
        return ctypes.cast(buffer, c_char_p)

    def set_step(self, step, mask):
        self.library.tracekit_nccl_set_step(c_int(step), c_uint32(mask))

    def init(self, identity, ranks, rank, *, nodes=1, name=None, log=None):
        context = c_void_p()
        logger = ctypes.cast(log, c_void_p) if log is not None else None
        text = name.encode() if name is not None else None
        head = (text, identity) if self.version == 4 else (identity,)
        if self.version == 4:
            result = self.table.init(byref(context), byref(self.mask), *head, nodes, ranks, rank, logger)
        else:
            result = self.table.init(byref(context), *head, byref(self.mask), text, nodes, ranks, rank, logger)
        assert result == 0
        return context.value

    def start(self, context, kind, *, parent=None, **values):
        """`values` go into the part of the description that belongs to the kind."""
        descr = self.Description()
        if self.version == 4:  # what lies behind the one byte of the type is whatever it was
            ctypes.memset(byref(descr), 0xA5, 8)
        descr.type, descr.parentObj = kind, parent
        parts = {COLL: "coll", P2P: "p2p", PROXY_OP: "proxyOp", PROXY_STEP: "proxyStep", KERNEL_CH: "kernelCh"}
        part = getattr(descr.u, parts.get(kind, "coll"))
        for field, value in values.items():
            setattr(part, field, self.literal(value) if isinstance(value, str) else value)
        handle = c_void_p(0xDEAD)
        assert self.table.startEvent(context, byref(handle), byref(descr)) == 0
        return handle.value

    def state(self, handle, state, **values):
        arguments = StateArguments(**values)
        assert self.table.recordEventState(handle, state, byref(arguments)) == 0

    def stop(self, handle):
        assert self.table.stopEvent(handle) == 0

    def finalize(self, context):
        assert self.table.finalize(context) == 0

    # ---- whole operations --------------------------------------------------------------------------------------------

    def collective(self, context, sequence, *, function="AllReduce", count=1024, channels=2, root=0):
        """Enqueue a collective, as NCCL does from the calling thread."""
        handle = self.start(
            context,
            COLL,
            seqNumber=sequence,
            func=function,
            count=count,
            root=root,
            datatype="ncclFloat32",
            nChannels=channels,
            nWarps=16,
            algo="RING",
            proto="SIMPLE",
        )
        self.stop(handle)
        return handle

    def channel(self, context, parent, number, begin, end):
        """A channel's kernel from start to end, as NCCL's proxy thread tells it."""
        handle = self.start(context, KERNEL_CH, parent=parent, channelId=number, pTimer=begin)
        self.state(handle, KERNEL_CH_STOP, pTimer=end)
        self.stop(handle)
        return handle


def in_process(library, directory, code, **variables):
    """Run `code` in a process with a ring of its own, `nccl(version)` at hand; returns the JSON it printed."""
    script = (
        "import ctypes, json, os, sys, threading\n"
        "from tests.collectors.nccl.harness import *\n"
        f"def nccl(version): return Nccl({str(library)!r}, version)\n"
        f"{code}"
    )
    environment = {**os.environ, "TRACEKIT_COLLECT_DIR": str(directory), **{k: str(v) for k, v in variables.items()}}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))]
