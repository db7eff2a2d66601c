"""The checkout that is measured."""

import subprocess

from tests.support.paths import ROOT


def current_commit() -> str:
    """Its short name."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
