"""Durable file operations: what is renamed into place is whole, also after a power cut."""

import os
from pathlib import Path

CHUNK = 4 << 20  # bytes per write: small enough that checksum and write find it in cache


def write_all(fd: int, data: memoryview | bytes) -> None:
    """Write every byte. One `os.write` may take fewer (Linux stops at 2 GiB). Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside, fsync, rename over, fsync the folder: a reader meets the old content or the new, whole."""
    beside = path.with_name(f".{path.name}.part")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(beside, path)
    sync_folder(path.parent)
