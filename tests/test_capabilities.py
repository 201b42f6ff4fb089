"""Every row of docs/capabilities.md shows what it says."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("docs_capabilities", ROOT / "docs" / "capabilities.py")
assert _spec is not None and _spec.loader is not None
capabilities = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = capabilities
_spec.loader.exec_module(capabilities)


def test_the_page_is_what_the_rows_say() -> None:
    written = (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8")
    assert written == capabilities.page(), "python docs/capabilities.py --write"


def test_a_row_has_a_name_of_its_own() -> None:
    names = [(row.group, row.name) for row in capabilities.ROWS]
    assert len(names) == len(set(names))


@pytest.mark.slow
@pytest.mark.timeout(capabilities.SECONDS + 30)
@pytest.mark.parametrize(
    "row", capabilities.ROWS, ids=lambda row: f"{row.group.partition(' ')[0]}-{row.name}"
)
def test_the_command_shows_it(row, tmp_path: Path) -> None:
    ran = capabilities.run_row(row, tmp_path)
    assert capabilities.shown(row, ran), f"{row.run}\nexit {ran.code}\n{ran.said[-4000:]}"
