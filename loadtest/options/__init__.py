"""The options of `tessera bench` by what they decide on, named as `vllm bench serve` names them.

Public: `server`, `work`, `arrival`, `report`, a struct each.
"""
