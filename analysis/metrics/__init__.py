"""Metrics of hosts and GPUs: whether they confirm or refute a culprit, and which hosts stand out without one."""
