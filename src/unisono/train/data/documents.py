"""Documents from disk: the running Python's own library, a text file, or a folder of them."""

import os
import sysconfig
from glob import has_magic
from pathlib import Path

from unisono.spec.errors import UsageError
from unisono.spec.paths import at_home, matching
from unisono.spec.runs import CONFIG

# Not the library itself: what others installed, and the tests with their deliberately broken files.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

Document = tuple[str, bytes]


def stdlib() -> list[Document]:
    """The library source of the running Python, ~11 MB, in the order of the relative paths."""
    return [(name, read(Path(name))) for name in stdlib_files()]


def stdlib_files() -> list[str]:
    """The files of the standard library, in the order of their relative paths. Raises UsageError D04."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(root, suffix=".py", skipped=_SKIPPED)
    if not files:
        raise UsageError(
            "this Python carries no library source",
            code="D04",
            where=str(root),
            likely="an embedded or frozen Python",
            fix='data.source = "text:FILE" with any text',
        )
    return files


def text(path: str) -> list[Document]:
    """A file, those of a pattern, or all files of a folder that are not hidden, in the order of the relative paths.
    Raises UsageError D02, D03, D04, and D06 for one of several that is no text."""
    documents = [(name, read(Path(name))) for name in text_files(path)]
    odd = next((name for name, body in documents if b"\0" in body[:4096]), "")
    if odd and Path(odd) != at_home(path):
        raise UsageError(
            f"{odd} is no text: it holds zero bytes",
            code="D06",
            where=path,
            fix="a folder that holds text alone; files whose name begins with a dot are left out",
        )
    return documents


def text_files(path: str) -> list[str]:
    """The files of a text: one file, those of a pattern, or all of a folder that are not hidden; of several, those that
    are not empty. Raises UsageError D02, D03, D04."""
    look(path)
    place = at_home(path)
    names = matched(path) or (_walk(place) if place.is_dir() else [str(place)])
    files = [name for name in names if len(names) == 1 or Path(name).stat().st_size]
    if not files:
        raise UsageError(
            "the folder holds no text" if place.is_dir() else "the files are empty",
            code="D04",
            where=str(place),
            fix='data.source = "text:PATH" with text in it',
        )
    return files


def matched(path: str) -> list[str]:
    """The files that a pattern such as `data/*.txt` means, in their order; none where `path` is no pattern. Raises
    UsageError D02 where no file is called so."""
    whole = at_home(path)
    if not has_magic(str(whole)) or whole.exists():
        return []
    files = [name for name in matching(path) if Path(name).is_file()]
    if not files:
        raise UsageError(
            f"no file is called {path}",
            code="D02",
            where="data.source",
            likely=_likely(whole),
            fix="a pattern that matches; * stays in a folder, ** does not; in a shell the value stands in '...'",
        )
    return files


def look(path: str) -> None:
    """Raises UsageError where nothing is there (D02), it cannot be read (D03), or nothing is in it (D04)."""
    if matched(path):
        return
    place = existing(path)
    try:
        if place.is_dir():
            empty = not any(place.iterdir())
        else:
            with place.open("rb") as file:
                empty = not file.read(1)
    except OSError as error:
        raise unreadable(place, error) from error
    if empty:
        raise UsageError(
            "the folder holds no data" if place.is_dir() else "the data file is empty",
            code="D04",
            where=str(place),
            fix='data.source = "text:PATH" with something in it',
        )


def existing(path: str) -> Path:
    """The path, with ~ resolved. Raises UsageError D02 where nothing is there."""
    place = at_home(path)
    if path and place.exists():
        if not place.is_file() and not place.is_dir():  # it may have no end, or nobody who writes
            raise UsageError(
                f"data is read from files, and {path} is a pipe or a device",
                code="D03",
                where=str(place),
                fix="write what comes out of it to a file, and name that",
            )
        return place
    raise UsageError(
        f"no such file or folder: {path or '(nothing)'}",
        code="D02",
        where="data.source",
        likely=_likely(place) if path else "no path after the colon",
        fix="a path that exists, absolute if in doubt; in a shell the value stands in '...'",
    )


def _likely(place: Path) -> str:
    """Why nothing is there."""
    try:
        parent = place.absolute().parent
    except FileNotFoundError:
        return "the current folder has been removed, and relative paths start there"
    if not parent.exists():
        return f"the folder {parent} does not exist either"
    return "" if place.is_absolute() else f"relative paths start at {Path.cwd()}"


def read(path: Path) -> bytes:
    """The file's bytes. Raises UsageError D03 where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> UsageError:
    """The error for a file or folder that the system refuses to give."""
    return UsageError(
        f"cannot read the data: {error.strerror or error}",
        code="D03",
        where=str(path),
        fix=f"ls -l {path}: the file must be readable by this user",
    )


def _walk(root: Path, suffix: str = "", skipped: frozenset[str] = frozenset()) -> list[str]:
    """All files below a folder that are not hidden, but for the run folders in it, which change as runs are made."""

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename or root), error) from error

    names: list[str] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        if _holds_runs(Path(folder)):
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        inside = os.path.relpath(folder, root)
        names += [
            os.path.normpath(os.path.join(inside, name)).replace(os.sep, "/")
            for name in files
            if name.endswith(suffix)
            and not name.startswith(".")
            and os.path.isfile(os.path.join(folder, name))
        ]
    return [str(root / name) for name in sorted(names)]


def _holds_runs(folder: Path) -> bool:
    """Whether a folder is a run's, or holds the runs of one name."""
    return (folder / CONFIG).exists() or any(folder.glob(f"*/{CONFIG}"))
