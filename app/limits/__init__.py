"""Bounds on what is used: use and limits of keys over all app processes, the machine's memory, the event loop's time.

Public: `key_use.KeyUse`, `lease.Lease`, `memory_watermark.MemoryWatermark`, `shared_memory`, `start_queue.StartQueue`.
"""
