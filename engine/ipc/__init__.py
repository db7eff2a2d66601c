"""The engine process and its face: client, supervisor, heartbeat, and the process itself."""
