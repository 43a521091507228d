"""Fixes: what to change about a job. The modules here make plans; the diagnosis prices them."""
