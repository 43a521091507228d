"""Reads samples of metrics: Parquet, OpenMetrics text, answers of Prometheus, and its HTTP interface."""
