"""Traces of torch.profiler (Kineto): one JSON file per rank, or several ranks fused in one."""
