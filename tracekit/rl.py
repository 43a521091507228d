"""Record RL post-training from a loop of your own: `with rl.phase("train", step=7):`, `rl.trajectory(...)`."""

from tracekit.collectors.record.rl_recorder import now, phase, record, trajectory

__all__ = ["now", "phase", "record", "trajectory"]
