"""OpenAI's API. Each endpoint is a room with its routes, request schema, events and response models (`objects`).

Shared here: `envelope` (completions and their chunks), `logprobs`, and the `objects` of several endpoints.
"""
