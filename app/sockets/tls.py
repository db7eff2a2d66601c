"""TLS of the listening sockets: certificates from files, checked first, exchanged while connections live on."""

from __future__ import annotations

import os
import ssl
import weakref
from pathlib import Path
from typing import Any

from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import ConfigError

HANDSHAKE_TIMEOUT = 10.0  # seconds
MAX_HANDSHAKES = 64  # beyond the connections that a process may have


class TooManyHandshakesError(ssl.SSLError):
    """More connections are being opened than a process may have."""


class TlsContext(ssl.SSLContext):
    """A context whose certificates can be replaced: connections begun later use the new ones.

    It also bounds the connections that are still in their handshake, which the HTTP server does not see yet.
    """

    _current: ssl.SSLContext
    _most: int
    _alive: weakref.WeakSet[ssl.SSLObject]

    @classmethod
    def of(cls, context: ssl.SSLContext, most_connections: int) -> TlsContext:
        found = cls(ssl.PROTOCOL_TLS_SERVER)
        found._current = context
        found._most = most_connections + MAX_HANDSHAKES
        found._alive = weakref.WeakSet()
        return found

    def replace(self, context: ssl.SSLContext) -> None:
        self._current = context

    def wrap_bio(self, *arguments: Any, **settings: Any) -> ssl.SSLObject:
        """Called by the event loop for each new connection; an error closes it."""
        if len(self._alive) >= self._most:
            raise TooManyHandshakesError("too many connections are being opened")
        connection = self._current.wrap_bio(*arguments, **settings)
        self._alive.add(connection)
        return connection


def make_context(settings: AppSettings, *, asks_clients: bool = True) -> ssl.SSLContext | None:
    """The context for the files that the settings name; None where they name none, which is plain HTTP.

    Args:
        asks_clients: require a client's certificate where `ssl_ca_certs` names authorities.

    Raises:
        ConfigError: a file is missing, cannot be read, or does not fit the others.
    """
    certfile, keyfile, ca_certs = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs
    if certfile is None:
        for option, value in (
            ("--ssl-keyfile", keyfile),
            ("--ssl-keyfile-password", settings.ssl_keyfile_password),
            ("--ssl-ca-certs", ca_certs),
        ):
            if value is not None:
                raise ConfigError(f"{option} needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _check_readable("--ssl-certfile", certfile, "CERTIFICATE")
    if keyfile is not None:
        _check_readable("--ssl-keyfile", keyfile, "PRIVATE KEY")
    _load_chain(context, certfile, keyfile, settings.ssl_keyfile_password)
    if ca_certs is not None:
        _check_readable("--ssl-ca-certs", ca_certs, "CERTIFICATE")
        try:
            context.load_verify_locations(cafile=ca_certs)
        except (OSError, ValueError):
            raise ConfigError(f"--ssl-ca-certs {ca_certs} has a certificate that cannot be read") from None
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_chain(context: ssl.SSLContext, certfile: str, keyfile: str | None, password: str | None) -> None:
    asked = False

    def give_password() -> str:  # else OpenSSL would ask for it on the terminal
        nonlocal asked
        asked = True
        return password or ""

    key_option, key_path = ("--ssl-keyfile", keyfile) if keyfile is not None else ("--ssl-certfile", certfile)
    try:
        context.load_cert_chain(certfile, keyfile, give_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        if reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key_option} {key_path} is not the key of the certificate in {certfile}") from None
        if asked and password is None:
            raise ConfigError(f"{key_option} {key_path} is encrypted: it needs --ssl-keyfile-password") from None
        if asked:
            raise ConfigError(f"--ssl-keyfile-password is not the password of {key_path}") from None
        if keyfile is None and "PRIVATE KEY-----" not in Path(certfile).read_text(errors="replace"):
            raise ConfigError(f"--ssl-certfile {certfile} has no private key: name it with --ssl-keyfile") from None
        why = f": {reason.lower().replace('_', ' ')}" if isinstance(reason, str) else ""
        raise ConfigError(f"the certificate {certfile} and its key cannot be used{why}") from None


def _check_readable(option: str, path: str, kind: str) -> None:
    """Raise ConfigError unless the file can be read and has PEM text of this kind."""
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {os.strerror(error.errno or 0)}") from None
    if f"{kind}-----".encode() not in text:
        raise ConfigError(f"{option} {path} has no {kind} in PEM form")
