"""`python -m unisono`, and the command `unisono`."""

import sys

try:
    from unisono.cli import main
except KeyboardInterrupt:  # Ctrl-C while this is still imported: as quiet as later ones
    sys.exit(130)

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
