"""Tessera on Ray Serve: replicas that are whole servers, a front that routes by prefix and load, a scaling policy.

Needs the extra `ray`. `application.build` is what `serve run` and `serve deploy` name; see deploy/ray.

Public: `application.build`, `prefix_router.PrefixRouter`, `scaling.QueueAndCachePolicy`.
"""
