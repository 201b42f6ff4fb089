"""The source: the core and its sister package, whose rooms have the same names."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, SISTER = ROOT / "src" / "unisono", ROOT / "src" / "unisono_contrib"
CORE_FILES = sorted(SOURCE.rglob("*.py"))
FILES = [*CORE_FILES, *sorted(SISTER.rglob("*.py"))]


def place_of(path: Path) -> str:
    """A file's place in its package: `codecs/qsgd.py`, whichever of the two it lies in."""
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else SISTER))


def file_at(place: str) -> Path:
    """The file at a place, of the core or else of the sister package."""
    return SOURCE / place if (SOURCE / place).exists() else SISTER / place


def module_of(path: Path) -> str:
    """A file's module: `unisono_contrib.codecs.qsgd`."""
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    """A file, parsed once for all tests of the source: nobody changes a tree."""
    return ast.parse(path.read_text(encoding="utf-8"))
