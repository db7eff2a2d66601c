"""The command `tessera`: options, model download, API keys.

Public: `command.main`, `serve_options.SERVE_OPTIONS`, `reference.render_page`.
"""
