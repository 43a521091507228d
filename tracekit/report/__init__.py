"""What is found out about a job, as data, tables, sentences and figures."""
