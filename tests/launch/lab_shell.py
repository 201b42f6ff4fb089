"""`ssh` between hosts of a lab: `python -m tests.launch.lab_shell HOST COMMAND`, in the network that LAB_DOORS names."""

import json
import os
import sys

from unisono_contrib.lab.spaces import enter


def main() -> None:
    """Be the command, there."""
    host, command = sys.argv[1:]
    enter(json.loads(os.environ["LAB_DOORS"])[host])
    os.execvp("sh", ["sh", "-c", command])


if __name__ == "__main__":
    main()
