"""KV blocks beyond the device: in host memory, and behind it on disk. Public: KVTiers, PublishedBlock, make_tiers.

`tiers.KVTiers` decides what is kept where, `BlockCopies` moves bytes between device and host, `DiskTier` between host
and files. The block manager asks it for what it does not find on the device, and offers it what it evicts.
"""
