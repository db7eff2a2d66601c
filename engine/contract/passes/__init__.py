"""What runs in each pass of an event loop: work in turn by account, within a few milliseconds.

Public: `account_queue.Accounted`, `account_queue.AccountQueue`, `pass_queue.PassQueue`.
"""
