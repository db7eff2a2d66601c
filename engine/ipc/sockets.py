"""Looks at ZMQ sockets."""

from __future__ import annotations

import zmq

# Plain integers: operators of pyzmq's enumerations take a microsecond.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received now; costs less than the exception of a receive in vain."""
    return bool(int(socket.get(_EVENTS)) & _POLLIN)
