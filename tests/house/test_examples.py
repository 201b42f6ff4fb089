"""The examples run as they are, each in an empty folder; recipes among them hold."""

import subprocess
import sys
from pathlib import Path

import pytest

from unisono import config

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.name)
def test_recipes_hold(path: Path) -> None:
    got = config.load(path)
    config.resolve(got.recipe, got.plan, None, got.origins)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
@pytest.mark.timeout(300)
def test_scripts_run(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
