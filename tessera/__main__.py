"""`python -m tessera`: the command `tessera`."""

import sys

from tessera.app.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
