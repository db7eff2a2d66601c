"""The engine process and its messages: client, supervisor, heartbeats, and the process itself.

Public: `client.EngineClient`, `supervisor.EngineSupervisor`, `process.serve`.
"""
