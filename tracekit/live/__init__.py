"""Analyse and store a job window by window while it runs, and report the findings.

`windows.py` decides when a window is over, and gets windows into the store. `run.py` takes a window out of the running
recording and analyses it; `watch.py` repeats this until the job ends. `metrics.py` and `receivers.py` publish the
contents of the store.
"""
