"""The HTTP service. `app.cli` starts it; nothing else is meant to be imported from outside."""
