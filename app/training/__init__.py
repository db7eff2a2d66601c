"""Examples for fine-tuning, from files of chats or preferences in OpenAI's format to tokens with weights.

Public: `dataset.DatasetReader`.
"""
