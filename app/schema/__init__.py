"""Request fields that several APIs share, each with its bounds and one clear sentence when they are broken.

Public: `request.RequestModel` and `parse_request`, `generation_fields`, `chat.ChatRequest`, `tools`,
`structured_output`, and the field types in `fields`.
"""
