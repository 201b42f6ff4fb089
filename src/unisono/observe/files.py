"""Files that are whole or absent: written aside, flushed to the disk, then renamed."""

import os
from pathlib import Path


def write_whole(path: str | Path, content: bytes | str) -> Path:
    """Replace `path` by `content` at once, so that a reader never meets half a file. Raises OSError."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    data = content.encode() if isinstance(content, str) else content
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    return target
