"""What a test says, in a sentence.

In: a test and what was measured. Out: the test with its sentence.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from tracekit.analysis.metrics.effects import MetricEffect
from tracekit.analysis.metrics.mechanisms import CPU_PRESSURE, Mechanism
from tracekit.base.text import short
from tracekit.report.metrics import MetricTest, MetricVerdict


def sentence_of(test: MetricTest, mechanism: Mechanism, effect: MetricEffect, usual: Mechanism) -> MetricTest:
    """The test with its sentence: "confirmed by metrics: SM clock 1,410 against 1,980 MHz ... predicts 1.40x, ..."."""
    usually = effect.own - effect.size if mechanism is CPU_PRESSURE else effect.own * math.exp(-effect.size)
    own, peers = (_figure(value / mechanism.scale) for value in (effect.own, usually))
    device = "" if effect.device is None else f" ({_device(effect.device)})"
    predicts = 1 + (test.predicts or 0.0)
    facts = f"{mechanism.what} {own} against {peers} {mechanism.unit} on {short(test.host)}{device}"
    dose = f"predicts {predicts:.2f}x, the trace shows {1 + test.shows:.2f}x"
    compared = "" if effect.basis.peers and effect.basis.past else f"; compared with {effect.basis.words}"
    if test.verdict is MetricVerdict.REFUTED:
        opening = "refuted"
    elif mechanism is usual:
        opening = "confirmed"
    else:
        opening = f"corrected, not the {usual.what}"
    return replace(test, sentence=f"{opening} by metrics: {facts} {dose}{compared}")


def _device(name: str) -> str:
    return f"GPU {name}" if name.isdigit() else short(name)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
