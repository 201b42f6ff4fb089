"""The simplest mistakes about data and checkpoints, found before torch is imported: in a blink, not after seconds.

Where the ranks start, `train.data` and `train_rank` look again, and deeper; what they say has the same codes.
"""

from pathlib import Path

from unisono.spec.errors import UsageError
from unisono.train.writing import nothing_to_resume


def look_at_data(source: str) -> None:
    """Raises UsageError where a `text:PATH` or `bin:PATH` is missing (D02), unreadable (D03) or empty (D04)."""
    scheme, _, text = source.partition(":")
    if scheme not in ("text", "bin"):
        return
    path = Path(text).expanduser()
    try:
        if path.is_file() or (path.exists() and not path.is_dir()):
            with path.open("rb") as file:
                empty = not file.read(1)
        elif path.is_dir():
            empty = not any(path.iterdir())
        elif scheme == "bin" and path.with_name(path.name + ".bin").exists():
            return
        else:
            raise UsageError(
                f"no such file or folder: {text or '(nothing)'}",
                where=f"data.source = {source!r}",
                likely="" if path.is_absolute() else f"relative paths start at {Path.cwd()}",
                fix="a path that exists, absolute if in doubt",
                code="D02",
            )
    except OSError as error:
        raise UsageError(
            f"cannot read the data: {error.strerror or error}",
            where=str(path),
            fix=f"ls -l {path}: it must be readable by this user",
            code="D03",
        ) from error
    if empty:
        raise UsageError(
            "the folder holds no data" if path.is_dir() else "the data file is empty",
            where=str(path),
            fix=f'data.source = "{scheme}:PATH" with something in it',
            code="D04",
        )


def look_at_checkpoints(run_dir: Path) -> None:
    """Raises UsageError K06 where a run to be resumed has no checkpoint at all."""
    if not any((run_dir / "checkpoints").glob("step-*/manifest.json")):
        raise nothing_to_resume(str(run_dir))
