"""Figures of a run: summary, table, plots, HTML page, comparison."""
