"""Bounds on what is used, counted over all app processes: use and limits of keys, and the machine's memory.

Public: `key_use.KeyUse`, `lease.Lease`, `memory_watermark.MemoryWatermark`, `shared_memory`.
"""
