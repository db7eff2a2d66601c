"""The listening Unix socket: its file, the rights on it, and a file that an ended server has left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from tessera.app.sockets.listener import BACKLOG
from tessera.engine.contract.errors import ConfigError

MAX_PATH = 107  # bytes, the kernel's limit
CONNECT_TIMEOUT = 2.0  # seconds


def listen_unix(path: str, mode: int) -> socket.socket:
    """Open a listening socket at `path` with the permissions `mode`.

    A socket file on which nothing listens any more is replaced.

    Raises:
        ConfigError: another server listens there, something else has that name, or it cannot be made.
    """
    if len(os.fsencode(path)) > MAX_PATH:
        raise ConfigError(f"--uds {path}: a socket's path may have at most {MAX_PATH} bytes")
    try:
        with _folder_lock(path):
            _remove_stale(path)
            return _bound(path, mode)
    except OSError as error:
        raise ConfigError(f"--uds {path}: cannot listen there: {error.strerror}") from None


def _bound(path: str, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)  # until the mode is set, this user alone can connect
    try:
        listener.bind(path)
        os.chmod(path, mode)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(old_mask)
    return listener


@contextlib.contextmanager
def _folder_lock(path: str) -> Iterator[None]:
    """Held while one server replaces a file: of two that start at once, the second finds the first one listening."""
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


class SocketFile:
    """The file of a listening Unix socket, to be removed at the end."""

    def __init__(self, listener: socket.socket) -> None:
        self.path: str = listener.getsockname()
        self._identity = _identity(self.path)

    def remove(self) -> None:
        """Unless another server has put its own in the place."""
        with contextlib.suppress(OSError), _folder_lock(self.path):
            if _identity(self.path) == self._identity:
                os.unlink(self.path)


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _remove_stale(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"--uds {path}: there is a file of that name, which is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(CONNECT_TIMEOUT)
        try:
            caller.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"--uds {path}: another server seems to listen there: {error.strerror}") from None
    raise ConfigError(f"--uds {path}: another server listens there; choose another path")
