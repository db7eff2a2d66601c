"""Operators' endpoints: health, readiness, metrics, version, status page. Public: the routers."""
