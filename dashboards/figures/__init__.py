"""Figures that dashboard and notebook share: pure functions from data to Plotly figures.

Nothing is computed from ops here.
"""
