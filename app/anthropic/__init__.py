"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

Public: `routes.router`, and `errors.ANTHROPIC`, the dialect of errors on its paths.
"""
