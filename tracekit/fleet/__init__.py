"""Studies of many jobs: how many straggle, what is lost, to what, and where.

In: traces of many jobs. Out: a study, which is a folder of Parquet tables (`tables`), and figures of it (`figures`).
`sources` finds traces, `analyse` turns one into rows, `executors` do so for all of them, `study`
stores the rows. docs/fleet.md documents commands and tables.
"""
