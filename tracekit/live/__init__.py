"""Beside a running job: windows of it are analysed and stored while it runs, and people hear of what they show.

`windows.py` says when a window is over, `run.py` takes it out of the running recording and stores what it shows,
`watch.py` does so until the job ends; `metrics.py` and `notify.py` tell others what the store knows.
"""
