"""Reports as text in a terminal: `pipeline` begins with the answer, `details` has what it rests on.

`op`, `gpu` and `hang` print the reports of op traces, of GPU traces and of hung jobs; `info` says what a trace holds.
"""
