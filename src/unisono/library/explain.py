"""Errors that end a script in the library way: the remedy stands below the traceback, as the last thing printed."""

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.spec.errors import UnisonoError


@contextmanager
def explained() -> Iterator[None]:
    """Add the error's block, with place and remedy, to what its traceback shows. Also a decorator."""
    try:
        yield
    except UnisonoError as error:
        if not getattr(error, "__notes__", None):
            error.add_note(error.render())
        raise
