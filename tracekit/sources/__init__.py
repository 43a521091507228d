"""What is this path? One registry answers for the library, the commands, the dashboard and studies of fleets.

`source` is the form of an entry, `registry` the table of all entries, `recognise` finds the entry of a path, `search`
the jobs in a folder, `wrong` words errors about the wrong kind of path, `load` opens jobs, `plug_in` adds those of
plug-ins.
"""
