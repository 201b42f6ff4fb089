"""`python -m unisono`."""

import sys

from unisono.cli import main

if __name__ == "__main__":
    sys.exit(main())
