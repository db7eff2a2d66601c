"""`python -m tessera.loadtest`: the same as `tessera bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tessera.loadtest.bench import run_bench
from tessera.loadtest.bench_options import BENCH_OPTIONS
from tessera.options.parser import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tessera.loadtest", description="Load an OpenAI-compatible server.")
    BENCH_OPTIONS.add_to(parser)
    namespace, unknown = parser.parse_known_args(arguments)
    return run_bench(BENCH_OPTIONS.read_or_exit(parser, namespace, unknown, os.environ))


if __name__ == "__main__":
    sys.exit(main())
