"""Places in the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
GOLDEN = TESTS / "golden"
BUILTIN = ROOT / "engine" / "builtin"
