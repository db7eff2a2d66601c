"""Authorities, certificates and keys for tests of TLS, made by the program openssl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

PASSWORD = "of the key"


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path


class Authority:
    """Signs certificates for localhost; `cert` is its own."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("certificates are made by the program openssl, which is not installed")
        self._folder = folder
        self.cert, self._key = folder / "authority.pem", folder / "authority.key"
        self._run("req", "-x509", *_new_key(self._key), "-out", self.cert, "-subj", "/CN=authority", "-days", "2")

    def sign(self, name: str) -> Certificate:
        """A certificate for localhost and 127.0.0.1 in files called `name`."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        self._run("req", *_new_key(made.key), "-out", request, "-subj", f"/CN={name}")
        signing = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", "2", "-extfile", extensions)
        self._run("x509", "-req", "-in", request, "-out", made.cert, *signing)
        return made

    def encrypted(self, made: Certificate) -> Path:
        """The key, encrypted with PASSWORD."""
        path = made.key.with_suffix(".encrypted")
        self._run("pkcs8", "-topk8", "-in", made.key, "-out", path, "-passout", f"pass:{PASSWORD}")
        return path

    def _run(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def _new_key(path: Path) -> tuple[str | Path, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)
