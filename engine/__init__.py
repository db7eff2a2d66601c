"""The inference engine.

Public: `engine.ipc.client` for servers, `engine.ops` and `engine.tensor` for device code.
"""
