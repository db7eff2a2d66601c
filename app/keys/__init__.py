"""API keys: names, digests, limits and rights.

Public: `api_key.ApiKey`, `keys_file.read_keys_file` and `write_keys_file`, `key_ring.KeyRing`.
"""
