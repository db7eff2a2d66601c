"""Memory that the app processes of one server share, for counts: each process writes its own part alone."""

from __future__ import annotations

import logging
import mmap
import os

logger = logging.getLogger("tessera.app")

BYTES_PER_COUNT = 8


def make_shared_memory(name: str) -> int | None:
    """A descriptor of empty memory; None, with a line in the log, if there is none."""
    try:
        return os.memfd_create(name)
    except OSError as error:
        logger.warning("%s are counted by each app process for itself: %s", name, error)
        return None


def map_counts(fd: int | None, num_counts: int) -> memoryview:
    """The memory behind `fd` as counts of 64 bits, all zeros at first; this process's own if there is not enough.

    Every page is allocated before it is mapped: a page that is missing later would end the process (SIGBUS).
    """
    num_bytes = num_counts * BYTES_PER_COUNT
    if fd is not None:
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            return memoryview(mmap.mmap(fd, num_bytes)).cast("q")
        except OSError as error:
            logger.warning("this app process counts for itself alone: %s", error)
    return memoryview(bytearray(num_bytes)).cast("q")
