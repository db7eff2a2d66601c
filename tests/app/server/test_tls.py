"""TLS files that cannot be used are named before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.app.settings import AppSettings
from tessera.app.sockets.tls import make_context
from tessera.engine.contract.errors import ConfigError
from tests.support.servers.certificates import PASSWORD, Authority, Certificate


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def good(authority: Authority) -> Certificate:
    return authority.sign("good")


def settings(**files: object) -> AppSettings:
    given = {name: str(value) for name, value in files.items()}
    return AppSettings(**{"model_folder": "", "served_model_names": (), **given})  # type: ignore[arg-type]


def test_the_key_may_be_in_the_certificates_file_or_encrypted(authority: Authority, good: Certificate) -> None:
    both = good.cert.with_suffix(".both")
    both.write_text(good.cert.read_text() + good.key.read_text())
    encrypted = authority.encrypted(good)
    assert make_context(settings()) is None
    assert make_context(settings(ssl_certfile=both)) is not None
    assert make_context(settings(ssl_certfile=good.cert, ssl_keyfile=good.key, ssl_ca_certs=authority.cert)) is not None
    used = settings(ssl_certfile=good.cert, ssl_keyfile=encrypted, ssl_keyfile_password=PASSWORD)
    assert make_context(used) is not None


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"ssl_certfile": "{missing}"}, r"--ssl-certfile \S+ cannot be read: No such file"),
        ({"ssl_certfile": "{folder}"}, r"--ssl-certfile \S+ cannot be read: Is a directory"),
        ({"ssl_certfile": "{cert}"}, r"--ssl-certfile \S+ has no private key: name it with --ssl-keyfile"),
        ({"ssl_certfile": "{key}"}, r"--ssl-certfile \S+ has no CERTIFICATE in PEM form"),
        ({"ssl_certfile": "{cert}", "ssl_keyfile": "{cert}"}, r"--ssl-keyfile \S+ has no PRIVATE KEY in PEM form"),
        ({"ssl_certfile": "{cert}", "ssl_keyfile": "{other}"}, r"--ssl-keyfile \S+ is not the key of the certificate"),
        (
            {"ssl_certfile": "{cert}", "ssl_keyfile": "{encrypted}"},
            r"--ssl-keyfile \S+ is encrypted: it needs --ssl-keyfile-password",
        ),
        (
            {"ssl_certfile": "{cert}", "ssl_keyfile": "{encrypted}", "ssl_keyfile_password": "hunter2"},
            r"--ssl-keyfile-password is not the password of",
        ),
        (
            {"ssl_certfile": "{cert}", "ssl_keyfile": "{key}", "ssl_ca_certs": "{broken}"},
            r"--ssl-ca-certs \S+ has a certificate that cannot be read",
        ),
        ({"ssl_certfile": "{broken}", "ssl_keyfile": "{key}"}, r"the certificate \S+ and its key cannot be used"),
        ({"ssl_keyfile": "{key}"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_ca_certs": "{cert}"}, "--ssl-ca-certs needs --ssl-certfile"),
    ],
)
def test_what_is_wrong_with_the_files_is_said(
    authority: Authority, good: Certificate, tmp_path: Path, files: dict[str, str], complaint: str
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    places = {
        "missing": tmp_path / "missing",
        "folder": tmp_path,
        "cert": good.cert,
        "key": good.key,
        "other": authority.sign("other").key,
        "encrypted": authority.encrypted(good),
        "broken": broken,
    }
    given = {name: value.format(**places) for name, value in files.items()}
    with pytest.raises(ConfigError, match=complaint) as caught:
        make_context(settings(**given))
    assert "hunter2" not in str(caught.value), "the password is not shown"
