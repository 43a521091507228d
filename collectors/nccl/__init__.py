"""NCCL's own events: a profiler plugin in C, its ring files, and how they are joined with the step trace.

`plugin.c` is compiled when tracekit is installed, and loaded by NCCL; `rings.py` reads its rings and puts GPU times on
the host's clock, and `join.py` gives the recorded communication ops those times. `launching.py` is what `tracekit
collect --nccl` does before, during and after.
"""
