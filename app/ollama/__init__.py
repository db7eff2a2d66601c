"""Ollama's API: /api/chat, /api/generate, /api/embed, /api/embeddings, and what tells of models.

Public: `routes.router`, `embed_routes.router`, `model_routes.router`, and `errors.OLLAMA`, the dialect of errors.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""
