"""Figures, one module per page: pure functions from data to Plotly figures. Nothing is computed from ops here."""
