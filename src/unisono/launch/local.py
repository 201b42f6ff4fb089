"""Ranks on this machine, the usual way: say what is happening, start the helper. No torch."""

from typing import TextIO

from unisono.launch.nursery import Nursery
from unisono.spec.settings import tell


def start(entry: str, ranks: int, quiet: bool = False, stream: TextIO | None = None) -> Nursery:
    """A nursery for `ranks` ranks of `entry`, importing torch from now on. Raises UsageError; see Nursery.

    Says so at once: an import takes seconds, and silence looks like a hang.
    """
    nursery = Nursery(entry)
    if not quiet:
        words = "1 process" if ranks == 1 else f"{ranks} processes"
        tell(f"starting {words} (importing torch) ...", stream)
    return nursery
