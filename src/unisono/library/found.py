"""Where another process finds a function of the user's."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.spec.errors import UsageError


def found(function: Callable[..., Any], asker: str, own: str, *, inner: bool = False) -> tuple[Path, str]:
    """(its file, its name there). own: how the module begins that our own processes make of the file. inner: whether a
    function inside a class will do. Raises UsageError V03, which names the `asker`."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    if module.startswith(own):
        raise UsageError(
            f"{asker.rpartition('.')[2]} was called while its own processes import the script",
            where=asker,
            fix="put the call under: if __name__ == '__main__':",
            code="V03",
        )
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    there = bool(name) and "<" not in name if inner else name.isidentifier()
    if not there or file is None or not Path(file).exists():
        raise UsageError(
            f"{name or function!r} cannot be found by another process",
            where=asker,
            fix="a function at the top of a file, neither a lambda nor inside another function",
            code="V03",
        )
    return Path(file).resolve(), name
