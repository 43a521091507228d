"""Hang analysis: from the flight recorders of a hung job to the ranks that hold it up.

`states.py` finds, for every unfinished operation, the members of its group that wait in it, have passed it or never
came; `wait_graph.py` builds the wait-for graph of ranks and finds its sinks, and calls that do not belong together;
`hang_culprits.py` turns both into culprits with evidence and adds the waiting ranks; `hang_report.py` words the result.
"""
