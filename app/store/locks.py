"""Locks among processes that end with their holder, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path


class ProcessLocks:
    """Numbered locks: POSIX record locks on single bytes of a file, so the kernel lets go of those of a dead process.

    Within one process a lock can be taken again by anybody: the caller keeps account of its own. The descriptor stays
    open to the end, since closing any descriptor of the file lets go of all locks.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_lock(self, number: int) -> bool:
        """Take lock `number`; false where another process has it. Raises OSError."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def wait_for(self, number: int) -> None:
        """Take lock `number` as soon as no other process has it."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, number)

    def unlock(self, number: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    def close(self) -> None:
        os.close(self._file)
