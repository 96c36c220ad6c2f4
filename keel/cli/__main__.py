"""Run the `keel` command with `python -m keel.cli`."""

import sys

from keel.cli import main

if __name__ == "__main__":
    sys.exit(main())
