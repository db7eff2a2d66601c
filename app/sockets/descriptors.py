"""Descriptors: as many as this process may have, and how many of them are for HTTP connections."""

from __future__ import annotations

import logging
import resource

from tessera.app.settings import MOST_CONNECTIONS
from tessera.engine.contract.errors import ConfigError

logger = logging.getLogger("tessera.serve")

MOST_DESCRIPTORS = 2**20  # more is of no use
RESERVED = 256  # for health checks, the engine's restarts, files; half of all where there are few


def raise_descriptor_limit() -> int:
    """Raise the soft limit to the hard one, which child processes inherit; -> the limit that now holds."""
    soft, hard = (_finite(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft >= hard:
        return soft
    try:
        _, true_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, true_hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of %d descriptors cannot be raised: %s", soft, error)
        return soft
    return hard


def connection_limit(descriptors: int, asked: int | None) -> int:
    """Most connections of one process. Raises ConfigError where more are asked for than there is room for."""
    room = descriptors - min(RESERVED, descriptors // 2)
    if asked is None:
        return min(room, MOST_CONNECTIONS)
    if asked > room:
        raise ConfigError(
            f"--max-connections {asked}: the limit of {descriptors} descriptors has room for {room}; "
            "raise it, as with ulimit -n"
        )
    return asked


def _finite(limit: int) -> int:
    return MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, MOST_DESCRIPTORS)
