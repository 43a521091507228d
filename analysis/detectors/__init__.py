"""All kinds of findings, in the order in which their detectors look; the detectors, in files of what they look at.

A line here adds a detector (docs/detectors.md); other packages name theirs as entry points (docs/extending.md). The
thresholds of a file stand in one struct at its top, which says of each what fixed it: a benchmark, a statistic, a
definition, or nobody ("Chosen"). `benchmarks causes` and `eventsim` validate those for pipelines, `benchmarks gpu` and
`one-gpu` those for recordings, `benchmarks rl` those for post-training: they inject causes, and count which are found
and who is accused wrongly (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from tracekit.analysis.evidence.subject import JobKind

#: Of each kind of finding, the module and class of its detector, and the kinds of jobs in which that looks.
DETECTORS = {
    "bad-worker": ("any_job.BadWorker", JobKind.PIPELINE | JobKind.GRAPH),
    "slow-host": ("slow_computes.SlowHosts", JobKind.PIPELINE),
    "slow-rank-group": ("slow_computes.SlowRankGroup", JobKind.PIPELINE),
    "slow-rank-of-worker": ("slow_computes.SlowRankOfWorker", JobKind.PIPELINE),
    "lockstep-jitter": ("slow_computes.LockstepJitter", JobKind.PIPELINE),
    "data-skew": ("any_job.DataSkew", JobKind.PIPELINE | JobKind.GRAPH),
    "hot-expert": ("uneven_experts.HotExpert", JobKind.PIPELINE | JobKind.GRAPH),
    "hot-rank": ("uneven_experts.HotRank", JobKind.PIPELINE | JobKind.GRAPH),
    "rotating": ("uneven_experts.Rotating", JobKind.PIPELINE | JobKind.GRAPH),
    "skew": ("uneven_experts.Skew", JobKind.PIPELINE | JobKind.GRAPH),
    "unknown-loads": ("uneven_experts.UnknownExpertLoads", JobKind.PIPELINE | JobKind.GRAPH),
    "one-launch-queue": ("late_rank.OneLaunchQueue", JobKind.GRAPH),
    "stage-imbalance": ("uneven_work.StageImbalance", JobKind.PIPELINE),
    "sequence-length-imbalance": ("uneven_work.UnevenSequences", JobKind.PIPELINE),
    "unequal-microbatches": ("uneven_work.UnequalMicrobatches", JobKind.PIPELINE),
    "position-effect": ("uneven_work.PositionEffect", JobKind.PIPELINE),
    "long-microbatch": ("uneven_work.LongMicrobatch", JobKind.PIPELINE),
    "random-variation": ("uneven_work.RandomVariation", JobKind.PIPELINE),
    "python-gc": ("any_job.GarbageCollection", JobKind.PIPELINE | JobKind.GRAPH),
    "process-pauses": ("pauses.ProcessPauses", JobKind.PIPELINE),
    "checkpoint-stalls": ("any_job.Checkpoints", JobKind.PIPELINE | JobKind.RECORDING),
    "evaluation": ("stops.Evaluations", JobKind.PIPELINE),
    "slow-steps": ("stops.StepsSlowForAll", JobKind.PIPELINE),
    "slow-p2p-link": ("network.SlowLink", JobKind.PIPELINE),
    "slow-nic": ("any_job.SlowNetworkCard", JobKind.PIPELINE | JobKind.GRAPH),
    "congestion": ("network.NetworkCongestion", JobKind.PIPELINE),
    "shared-network-card": ("network.SharedCard", JobKind.PIPELINE),
    "unrecorded-worker-late": ("trace_faults.UnrecordedWorkerLate", JobKind.PIPELINE),
    "late-data-loading": ("any_job.LateData", JobKind.PIPELINE | JobKind.GRAPH),
    "slow-optimizer": ("host_work.SlowOptimizer", JobKind.PIPELINE),
    "slow-host-code": ("any_job.SlowHostCode", JobKind.PIPELINE | JobKind.GRAPH),
    "host-bound-launch": ("any_job.HostBound", JobKind.PIPELINE | JobKind.RECORDING),
    "busy-cores": ("pauses.BusyCores", JobKind.PIPELINE),
    "clock-error": ("trace_faults.ClockError", JobKind.PIPELINE),
    "too-little-trace": ("trace_faults.TooLittleTrace", JobKind.PIPELINE),
    "warm-up": ("gpu_time.WarmUp", JobKind.RECORDING),
    "gpu-allocation": ("gpu_host.GpuAllocation", JobKind.RECORDING),
    "python-code": ("gpu_host.PythonCode", JobKind.RECORDING),
    "host-operator": ("gpu_host.HostOperators", JobKind.RECORDING),
    "slow-copies": ("gpu_time.SlowCopies", JobKind.RECORDING),
    "slow-kernels": ("slow_kernels.SlowKernels", JobKind.RECORDING),
    "recompute": ("gpu_time.Recompute", JobKind.RECORDING),
    "stream-waits": ("gpu_time.StreamWaits", JobKind.RECORDING),
    "idle-unseen": ("gpu_time.IdleUnseen", JobKind.RECORDING),
    "sync-calls": ("gpu_host.SyncCalls", JobKind.GRAPH),
    "late-start": ("late_rank.LateStart", JobKind.GRAPH),
    "late-rank": ("late_rank.LateRank", JobKind.GRAPH),
    "exposed-communication": ("gpu_time.ExposedCommunication", JobKind.RECORDING),
    "queueing": ("rl_losses.Queueing", JobKind.POST_TRAINING),
    "tail": ("rl_losses.Tail", JobKind.POST_TRAINING),
    "engines": ("rl_losses.UnevenEngines", JobKind.POST_TRAINING),
    "tools": ("rl_losses.Tools", JobKind.POST_TRAINING),
    "reward": ("rl_losses.Reward", JobKind.POST_TRAINING),
    "sync": ("rl_losses.WeightSync", JobKind.POST_TRAINING),
    "unexplained": ("detector.Unexplained", JobKind.NONE),
    "healthy": ("detector.Healthy", JobKind.NONE),
}

#: Kinds that only jobs with all-to-alls have, so that no other job loads their modules.
OF_EXCHANGES = {"hot-expert", "hot-rank", "rotating", "skew", "unknown-loads"}
