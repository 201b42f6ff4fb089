"""The core runs without its sister package, and says what is missing where somebody asks for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import CORE_FILES, place_of

STEP = (
    "--name alone --data.source stdlib --model.kind gpt --model.n_layer 1 --model.n_head 1 --model.d_model 16"
    " --model.context 16 --train.steps 1 --train.global_batch 2 --train.micro_batch 2 --train.eval_every 0"
    " --out.report false --plan dp=1 --quiet"
)
NONE = 'raise ModuleNotFoundError("not installed", name="unisono_contrib")\n'


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose processes find no `unisono_contrib`."""
    folder = tmp_path_factory.mktemp("none")
    (folder / "unisono_contrib.py").write_text(NONE)
    first = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(first)}


def ran(environ: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["config", "show", "--demo"],
        ["plan", "--demo", "--cluster", "dgx-a100:1", "--top", "1"],
        ["train", *STEP.split()],
    ],
    ids=lambda words: words[0].strip("-"),
)
def test_the_core_runs_alone(words: list[str], environ: dict[str, str], tmp_path: Path) -> None:
    done = ran(environ, tmp_path, *words)
    assert done.returncode == 0, done.stderr


def test_what_is_missing_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    done = ran(environ, tmp_path, "verify", "--conformance", "plain")
    assert done.returncode == 2
    assert "U-E01  unisono_contrib.verify.conformance is not installed" in done.stderr


def test_the_core_names_its_sister_package_in_few_places() -> None:
    """Its name stands in the finder; files that ask by their own name say `contributed` or `door`."""
    named = [place_of(path) for path in CORE_FILES if "unisono_contrib" in path.read_text()]
    assert set(named) <= {
        "spec/finder.py",
        "spec/frames.py",
        "library/user_hooks.py",
        "library/lightning.py",
        "library/notebook.py",
        "library/stacks.py",
        "library/manager.py",
        "library/streaming.py",
        "library/trainer.py",
        "comm/threads.py",
        "rpc.py",
        "train/export/quantised.py",
    }
