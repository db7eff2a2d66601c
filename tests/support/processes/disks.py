"""Disks that fill up."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of half a megabyte, where this user may mount one; its path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="disk", dir="/tmp"))
    options = ["-t", "tmpfs", "-o", "size=512k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is for root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()
