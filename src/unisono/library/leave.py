"""Leaving together: torch aborts a process at random whose Gloo groups are alive when Python ends."""

import sys

import torch.distributed as dist

from unisono.comm.group import Group
from unisono.launch.context import flush_and_leave
from unisono.spec.errors import UnisonoError
from unisono.spec.settings import tell


def part(group: Group) -> None:
    """Wait for the others, then take all groups down; a group that another rank still uses would abort that rank."""
    if dist.is_initialized():
        group.barrier()
        dist.destroy_process_group()


def part_at_exit(group: Group) -> None:
    """At the interpreter's end: together after success, at once after an exception, which has been printed."""
    error = getattr(sys, "last_value", None)  # set when an exception ended the script
    if error is not None:
        flush_and_leave(error.exit if isinstance(error, UnisonoError) else 1)
    try:
        part(group)
    except RuntimeError as gone:
        first = str(gone).strip().splitlines()[0][:200]
        tell(f"unisono: another rank left before the end ({first})")
        flush_and_leave(1)
