"""Analyse and store a job window by window while it runs, and report the findings.

`windows.py` decides when a window is over. `run.py` takes it out of the running recording, analyses it and stores the
result; `watch.py` repeats this until the job ends. `metrics.py` and `notify.py` publish the contents of the store.
"""
