"""What a planted bug is, and the lists of them.

`*.toml` beside this file hold one table each:

    [[bug]]
    name = "lora_by_the_root_of_its_rank"
    file = "models/lora.py"                 # in src/unisono, or in src/unisono_contrib
    old = "alpha / rank"                    # stands there once
    new = "alpha / rank**0.5"
    plans = ["dp=2"]                        # under which `verify` may find it; none where no proof can see it
    recipe = { "train.lora_rank" = 2 }      # of the proof, where it needs another
    tests = ["models/test_lora.py"]         # quick ones in tests/, FILE or FILE::NAME, where the proof finds nothing

Unlike those of `tests/verify/mutations`, which patch a running proof, these are in the code that every rank, one device
and the tests import.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src"


@dataclass(frozen=True, slots=True)
class TextBug:
    """See the module. lines: how often `old` stands in the file, if not once; all of them are replaced. backend: of
    the proof, as `launch.backend`; threads where absent."""

    name: str
    file: str
    old: str
    new: str
    plans: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    lines: int = 1
    backend: str = ""

    @property
    def room(self) -> str:
        """The package that has it."""
        return self.file.partition("/")[0]

    def path(self, source: Path) -> Path:
        """Its file in a copy of the source: of the core, or else of the sister package."""
        core = source / "unisono" / self.file
        return core if core.exists() else source / "unisono_contrib" / self.file

    def planted(self, source: str) -> str:
        """The source with the bug. Raises ValueError where its place is not there as often as it says."""
        if (found := source.count(self.old)) != self.lines:
            raise ValueError(
                f"{self.name}: {self.old!r} stands {found} times in {self.file}, not {self.lines}"
            )
        return source.replace(self.old, self.new)


def all_bugs() -> tuple[TextBug, ...]:
    """Those of all lists, by the lists' names."""
    tables = [tomllib.loads(path.read_text())["bug"] for path in sorted(Path(__file__).parent.glob("*.toml"))]
    return tuple(
        TextBug(**{key: tuple(x) if isinstance(x, list) else x for key, x in one.items()})
        for table in tables
        for one in table
    )
