"""The command `tessera`: options, model download, API keys. Public: `command.main`."""
