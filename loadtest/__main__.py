"""`python -m loadtest`: the same as `tessera bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tessera.loadtest.command import bench_command
from tessera.loadtest.options import add_options


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description="Load an OpenAI-compatible server.")
    add_options(parser)
    return bench_command(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
