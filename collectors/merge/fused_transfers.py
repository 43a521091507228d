"""Transfers that frameworks start together and record as one; hooks and NDTimeline use the same names for them."""

from __future__ import annotations

from tracekit.trace.model import OpKind

#: Name of the fused transfer -> the ops in it.
FUSED_TRANSFERS: dict[str, tuple[OpKind, ...]] = {
    "forward-send-backward-recv": (OpKind.FORWARD_SEND, OpKind.BACKWARD_RECV),
    "backward-send-forward-recv": (OpKind.BACKWARD_SEND, OpKind.FORWARD_RECV),
    "forward-send-forward-recv": (OpKind.FORWARD_SEND, OpKind.FORWARD_RECV),
    "backward-send-backward-recv": (OpKind.BACKWARD_SEND, OpKind.BACKWARD_RECV),
    "forward-backward-send-forward-backward-recv": (
        OpKind.FORWARD_SEND,
        OpKind.BACKWARD_SEND,
        OpKind.FORWARD_RECV,
        OpKind.BACKWARD_RECV,
    ),
}
