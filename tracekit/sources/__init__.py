"""Identifies paths: one registry for the library, the commands, the dashboard and studies of fleets.

`source` is the form of an entry, `registry` the table of all entries; `load` finds the entry of a path, the jobs in a
folder and words for the wrong kind of path, and opens jobs, also those of plug-ins.
"""
