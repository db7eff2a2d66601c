"""Layers whose weights stay in host memory and come to the device during each step. Public: HostLayers, LayerStream.

`HostLayers` moves layers there while the weights load, `LayerStream` brings them through two slots on the device as a
forward goes on, and `choice` says which layers.
"""
