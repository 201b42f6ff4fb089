"""What a wheel installs runs outside of the checkout, with its data files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from tests.house.source import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
_BUILT = (".pyc",)
COMMANDS = (
    ["--version"],
    ["plan", "--demo", "--cluster", "dgx-a100:1", "--top", "1"],
    ["simulate", "--demo", "--plan", "dp=8", "--cluster", "dgx-a100:1"],
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel of this checkout installs; torch and the rest are those of this Python."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source = folder / "source"  # a build leaves files beside what it reads
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([*pip, *build], cwd=folder, check=True)
    (wheel,) = folder.glob("*.whl")
    place = folder / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place), str(wheel)], cwd=folder, check=True)
    return place


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0].strip("-"))
def test_it_runs_elsewhere(words: list[str], installed: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    command = [str(installed / "bin" / "unisono"), *words]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    if words == ["--version"]:
        assert done.stdout == f"unisono {unisono.__version__}\n"


def test_both_packages_are_those_that_were_installed(installed: Path, tmp_path: Path) -> None:
    code = "import unisono, unisono_contrib; print(unisono.__file__, unisono_contrib.__file__)"
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(str(installed)) for path in done.stdout.split())
    kept = {
        path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.*") if path.suffix not in _BUILT
    }
    assert {path for path in kept if not (installed / path).exists() and "egg-info" not in str(path)} == set()
