"""Items, which conversations are made of, and /v1/conversations, which stores them.

Public: `routes.router`, `items.InputItem`, `item_list.listed_items`, `store.ConversationStore`.
"""
