"""`[callbacks]`: functions of the user's that a run calls while it trains."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.section import Section


class CallbacksConfig(Section):
    """Functions of your own, `FILE.py:FUNCTION`, which rank 0 calls after each step, validation and save. They look on,
    and change nothing of the run."""

    name: ClassVar[str] = "callbacks"
    one_run: ClassVar[bool] = True

    call: tuple[str, ...] = Field(
        default=(),
        description='functions, ["FILE.py:FUNCTION", ...]; each gets what has happened: `kind`, `step`, ...',
    )

    def problems(self, recipe: Any, plan: Any) -> Iterator[Problem]:
        for text in self.call:
            path, _, function = text.rpartition(":")
            if not path.endswith(".py") or not function.isidentifier():
                yield Problem("C06", f"{text!r} is no function", "callbacks.call", "FILE.py:FUNCTION")
            elif not Path(path).is_file():
                fix = "paths are relative to the working folder"
                yield Problem("C06", f"no such file: {path}", "callbacks.call", fix)
