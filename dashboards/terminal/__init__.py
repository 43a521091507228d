"""Reports as text in a terminal: `pipeline` begins with the answer, `details` has the evidence behind it.

`op`, `gpu` and `hang` print the reports of op traces, of GPU traces and of hung jobs; `info` prints the content of a
trace.
"""
