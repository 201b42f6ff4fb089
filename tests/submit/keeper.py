"""`python -m tests.submit.keeper FOLDER COMMANDS`: starts daemons, and prints `up`. When its standard input ends, because
the test is over or was killed, it ends them with all that they started, and removes the folder.

Daemons leave their parents, and those of Slurm start others that do. A subreaper inherits them all, so none is lost.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SUBREAPER = 36  # prctl's PR_SET_CHILD_SUBREAPER
_PATIENCE = 5.0  # seconds between the signal that asks and the one that does not


def main(folder: str, commands: str) -> int:
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        for words in json.loads(commands):
            subprocess.run(words, check=True, timeout=30, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        print("up", flush=True)
        sys.stdin.read()
    finally:
        _end()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _end() -> None:
    for number, seconds in ((signal.SIGTERM, _PATIENCE), (signal.SIGKILL, 2 * _PATIENCE)):
        sent, end = set[int](), time.monotonic() + seconds
        while (left := _descendants()) and time.monotonic() < end:
            for pid in left - sent:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            sent |= left
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.02)


def _descendants() -> set[int]:
    """All processes that came of this one and have not been waited for."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family, size = {os.getpid()}, 0
    while size < len(family):
        size = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    return family - {os.getpid()}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
