"""`tessera train`: fine-tunes a model on a file of chats.

Public: `options.TRAIN_OPTIONS`, `command.train_command`.
"""
