"""The documentation: Markdown pages, the figures behind them, and `docs.generate`, which makes the rest."""
