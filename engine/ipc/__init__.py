"""The engine process and its messages: client, supervisor, heartbeats, and the process itself.

Public: `client.EngineClient`, `request_stream.RequestStream`, `supervisor.EngineSupervisor`, `process.serve`,
`load.load_engine`.
"""
