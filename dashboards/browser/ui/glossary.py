"""The terms of the pages, each with its definition: one place, so that all pages use the same words."""

from __future__ import annotations

from typing import Final

from tracekit.trace.gpu_activity import IdleReason

GLOSSARY: Final[dict[str, str]] = {
    "costs alone": "The share of a step that is lost with only this as recorded and all else like its peers, exact.",
    "summed": "What each of these workers alone costs, summed: what they cost together if costs add up.",
    "launch delays": "Host-side time (data loading, Python, kernel launches) between an op being ready and its start.",
    "GPU-hours a day": "Assumes that all GPUs of the layout run all day as in the traced steps.",
    "lost": "What goes with the causes, and what stragglers cost beyond them, by the verdict of each job.",
    "recorded": "Mean step time as recorded in the trace.",
    "original": "Mean step time of the replay without launch delays.",
    "ideal": "Mean step time if every compute op took the mean and every communication op the median of its kind.",
    "trust": "Whether the replay explains the recording: replay error and launch delays both at most 5%.",
    "replay error": "How far the replay with launch delays is from the recorded step time.",
    "worker": "One data-parallel rank x pipeline stage cell, with all its tensor- and context-parallel ranks.",
    "stage": "Pipeline stage, pp_rank: a slice of the model's layers, or several with interleaving: its model chunks.",
    "op kind": "What an operation does: forward-compute, backward-send, grads-reduce-scatter ...",
    "peers": "Ops of the same kind on other workers and microbatches of the step.",
    "fix": "What to do about it; its price is the step time of a replay, with its error.",
    "assumes": "What the price takes for granted and the trace does not show.",
    "sure": "How sure it is that the cause exists where it is named: 50% where the weakest figure of its evidence is"
    " at its threshold, at most 99%. Not a share of the loss.",
    "at most": "A bound: the fix saves at most this, how much of it is reached is open.",
}

#: What a finding on a GPU is about, by its reason: why the GPU is idle, or what else takes time.
GPU_REASONS: Final[dict[str, str]] = {
    IdleReason.LOADER: "the data loader has no batch ready",
    IdleReason.GC: "Python collects garbage",
    IdleReason.SYNCHRONISE: "a call waits for the GPU",
    IdleReason.ALLOCATION: "GPU memory is allocated or freed",
    IdleReason.RUNTIME_CALL: "another call of the GPU's runtime",
    IdleReason.OPERATOR: "an operator prepares its launch",
    IdleReason.PYTHON: "Python runs between operators",
    IdleReason.LAUNCH_CALL: "the call that launches",
    IdleReason.LAUNCH_LATENCY: "launched, and on its way to the GPU",
    IdleReason.QUEUED: "launched long before, and held up on the GPU",
    IdleReason.UNKNOWN: "its launch was not recorded",
    IdleReason.CHECKPOINT: "a checkpoint is written",
    "kernel": "kernels below what the card can do",
    "transfer": "copies that nothing hides",
    "launch-bound": "kernels that end before the next is launched",
}

#: What began a gap of the GPU, by its name in a report.
GAP_BEGINS: Final[dict[str, str]] = {
    "synchronise": "a call that waited for the GPU",
    "host": "the host late with its next launch",
    "queued": "work held up on the GPU",
    "unknown": "work whose launch was not recorded",
}
