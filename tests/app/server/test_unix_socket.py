"""The Unix socket's file: its mode, what an ended server has left, what is not to be replaced."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from tessera.app.sockets.unix_socket import SocketFile, listen_unix
from tessera.engine.contract.errors import ConfigError


def test_a_socket_has_its_mode_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listen_unix(str(path), 0o620) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o620
        file = SocketFile(listener)
    file.remove()
    assert not path.exists()


def test_what_an_ended_server_has_left_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    listen_unix(path, 0o660).close()
    with listen_unix(path, 0o660) as listener, socket.socket(socket.AF_UNIX) as caller:
        ended = SocketFile(listener)
        caller.connect(path)
        with pytest.raises(ConfigError, match="another server listens there"):
            listen_unix(path, 0o660)
    with listen_unix(path, 0o660):
        os.utime(path)
        ended._identity = (0, 0)  # the inode's number may be used again
        ended.remove()
        assert os.path.exists(path), "the file of a later server stays"


def test_other_files_and_impossible_places_are_named(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("mine")
    for path, complaint in (
        (str(taken), "there is a file of that name, which is no socket"),
        (str(tmp_path / "missing" / "s"), "No such file or directory"),
        (str(tmp_path / ("x" * 120)), "at most 107 bytes"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            listen_unix(path, 0o660)
    assert taken.read_text() == "mine"
