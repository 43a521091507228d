"""The runs that many tests look at: name -> `NAME=value ... script.py argument ...`, as `several.py` takes them."""

from tests.collectors.sabotage.faults import SIGNALS, TESTED

PAUSES = {
    "collecting": "RANKS=2 PAUSE=gc paused.py",
    "collecting-in-closure": "RANKS=2 PAUSE=gc CLOSURE=1 paused.py",
}
#: Single-process training loops.
STYLES = (
    *("plain", "scaler", "compile", "compile-in-place", "checkpointing", "fork", "spawn"),
    *("spans", "set-step", "steps", "eval"),
    *("closure", "two-modules", "module-in-data", "autograd-grad", "functional"),
)
LOOPS = {style: f"loop.py {style}" for style in (*STYLES, "misuse", "compile-many")}
#: Rows of the matrix of frameworks.
ROWS = {
    row: f"RANKS=2 STEPS=4 ../../../benchmarks/frameworks_train.py {row}"
    for row in ("fsdp1", "sequence_parallel", "context_parallel", "expert_parallel", "zero_bubble")
}
#: Rank and number of ranks, as Open MPI, srun and MPICH call them.
LAUNCHERS = {
    "mpi": "RANK_IN=OMPI_COMM_WORLD_RANK SIZE_IN=OMPI_COMM_WORLD_SIZE",
    "srun": "RANK_IN=SLURM_PROCID SIZE_IN=SLURM_STEP_NUM_TASKS",
    "pmi": "RANK_IN=PMI_RANK SIZE_IN=PMI_SIZE",
}
#: Jobs of several ranks.
SHAPES = {
    "fsdp": "RANKS=2 fsdp_alone.py",
    "spawned": "SPAWN=1 quick.py",
    "fsdp-slow": "RANKS=2 STEPS=4 SLOW_RANK=1 SLOW_MS=20 fsdp_alone.py",
    "uneven": "RANKS=2 plain_pipeline.py",
    "sharded": "RANKS=2 sharded_optimizer.py",
    "functional-collectives": "RANKS=2 functional.py",
    "logs": "RANKS=2 STEPS=8 logs.py",
    "slept": "RANKS=2 PAUSE=sleep WHERE=middle paused.py",
    "met": "RANKS=2 MEET=1 PAUSE=sleep WHERE=between paused.py",
    "ddp": "RANKS=4 STEPS=4 ddp_accumulation.py",
    "fsdp-pipeline": "RANKS=4 fsdp_interleaved.py",
    "megatron": "RANKS=4 megatron_like.py",
    "accumulation": "RANKS=2 STEPS=5 ../../../benchmarks/frameworks_train.py accumulation",
    "pipeline": "RANKS=4 STEPS=6 SLOW_RANK=3 SLOW_MS=6 dp2_pp2.py",
    **{launcher: f"RANKS=2 {variables} optimizer_first.py" for launcher, variables in LAUNCHERS.items()},
}
#: What goes wrong in a training process, or is made to.
FAULTS = {
    **{
        f"rank-2-{crash}s": f"RANKS=4 STEPS=7 CRASH_STEP=4 CRASH_RANK=2 CRASH={crash} dp2_pp2.py"
        for crash in ("raise", "kill")
    },
    "killed": "RANKS=2 COUNTED=killed killed.py",
    "killed-handler": "RANKS=2 COUNTED=killed-handler HANDLER=1 killed.py",
    "hooks-broken": "SABOTAGE=hooks loop.py plain",
    "hooks-broken-pipeline": "RANKS=4 STEPS=6 SABOTAGE=hooks dp2_pp2.py",
    "renamed": "SABOTAGE=renamed loop.py plain",
    "driverless": "RANKS=2 SABOTAGE=driverless ddp_accumulation.py",
    "full-disk": "SABOTAGE=disk loop.py plain",
    "no-manifest": "SABOTAGE=manifest quick.py",
}
#: Jobs on a GPU that is played, with the library that plays NVML in the folder, and one without it.
PLAYED = {
    "gpu": "NVML=./libnvidia-ml.so.1 fake_gpu.py",
    "gpus": "NVML=./libnvidia-ml.so.1 RANKS=2 STEPS=24 fake_gpu.py",
    "gpu-fails": "NVML=./libnvidia-ml.so.1 STEPS=30 FAILS_AT=20 fake_gpu.py",
    "gpu-captures": "NVML=./libnvidia-ml.so.1 STEPS=28 CAPTURES_AT=13 fake_gpu.py",
    "gpu-without-nvml": "STEPS=8 fake_gpu.py",
}
#: A training for each way for the recorder to fail, and one in which it does not.
SABOTAGED = {"none": "trains.py", **{name: f"SABOTAGE={name} trains.py" for name in TESTED}}
RUNS = {**PLAYED, **SHAPES, **ROWS, **PAUSES, **LOOPS, **FAULTS, **SABOTAGED}
#: One of each kind, for `make test`; the tests that need another one are marked slow.
EVERY_PUSH = (
    *("gpu", "fsdp", "ddp", "logs", "pipeline", "plain", "rank-2-kills", "hooks-broken", "none"),
    *("disk-is-full", "every-file-is-a-link"),
)
#: Those whose results must be what they are without collect.
ALONE = (
    *("fsdp", "uneven", "sharded", "ddp", "fsdp-pipeline", "accumulation", "pipeline", "plain", "compile-many"),
    *ROWS,
    "none",
    *(name for name in SIGNALS if name in TESTED),  # the only ones that make a difference without collect, too
)
#: Runs that one process makes under collect, one after the other.
BATCHES = {
    "every-push": [*EVERY_PUSH],
    **{
        name: [run for run in kinds if run not in EVERY_PUSH]
        for name, kinds in {
            "jobs": PLAYED | SHAPES | PAUSES | FAULTS,
            "loops-and-frameworks": LOOPS | ROWS,
            "sabotaged": SABOTAGED,
        }.items()
    },
}
#: The same without collect: these are few, and importing torch takes longer than most of them.
BATCHES_ALONE = {
    "every-push": [run for run in ALONE if run in EVERY_PUSH],
    "others": [run for run in ALONE if run not in EVERY_PUSH],
}
