"""Operators' endpoints: health, readiness, metrics, version, page. Public: the routers."""
