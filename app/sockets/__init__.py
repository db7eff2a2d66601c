"""Listening sockets: addresses, Unix sockets, TLS, and the descriptors that connections need.

Public: `listener.listen`, `unix_socket.listen_unix`, `tls.make_context`, `descriptors.connection_limit`.
"""
