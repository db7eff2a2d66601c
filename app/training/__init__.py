"""Examples for fine-tuning, from files of chats in OpenAI's format to tokens with weights.

Public: `conversations.read_conversations`, `encoder.ConversationEncoder`.
"""
