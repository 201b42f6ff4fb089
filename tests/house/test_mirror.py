"""tests/ mirrors src/: every room, of the core or of its sister package, has its folder, and every module of it that does something is drawn in there or
by the tests of who uses it."""

import pytest

from tests.house.source import ROOT, SISTER, SOURCE

TESTS = ROOT / "tests"
PACKAGES = sorted({path.parent.name for home in (SOURCE, SISTER) for path in home.glob("*/__init__.py")})


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_tests_of_its_own(package: str) -> None:
    tests = [path for path in (TESTS / package).rglob("test_*.py") if "def test_" in path.read_text()]
    assert tests, f"tests/{package} has no test"
    of_it = (
        f"unisono.{package}",
        f"unisono_contrib.{package}",
        "unisono(",
    )  # the latter starts a verb, as a user does
    drawn = [path for path in tests if any(word in path.read_text() for word in of_it)]
    assert drawn, f"tests/{package} draws in nothing of unisono.{package}"


def test_every_folder_of_tests_says_what_it_is_of() -> None:
    others = {"conformance", "fixtures", "gpu", "house", "golden", "security"}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - others <= set(PACKAGES)
