"""`tessera chat`: a conversation in the terminal.

Public: `command.chat_command`, `options.CHAT_OPTIONS`.
"""
