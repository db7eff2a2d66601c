"""The listening socket, opened first so that a wrong address is reported at once."""

from __future__ import annotations

import errno
import socket

from tessera.engine.contract.errors import ConfigError

BACKLOG = 2048

_REASONS = {
    errno.EADDRINUSE: "another program already listens there; choose another {option}",
    errno.EADDRNOTAVAIL: "this machine does not have that address; choose another --host",
    errno.EACCES: "that port is not allowed to this user; choose a {option} above 1023",
}


def listen(host: str, port: int, option: str = "--port") -> socket.socket:
    """Open a listening socket. Raises ConfigError, which names the port's `option`, if that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"--host {host} is not an address, nor a name that has one") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        reason = _REASONS.get(error.errno or 0, str(error.strerror)).format(option=option)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from None
    return listener
