"""The choice of an engine for a request: the longest cached prefix, weighed against load. Pure: no clock, no sockets.

One home for the engines of a host, for Ray Serve's replicas and for the simulation of a thousand of them.

Public: `prefix_index.PrefixIndex`, `policy.RoutingPolicy`, `block_keys.block_keys`.
"""
