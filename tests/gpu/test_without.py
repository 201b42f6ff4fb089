"""What the GPU benchmark does where there is no GPU: says so, and can be tried on a processor."""

import json
import os
from pathlib import Path

import pytest

from tests.forked import Forked

pytestmark = pytest.mark.timeout(300)

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "gpu.py")


def play(*flags: str, **environment: str) -> str:
    done = Forked([SCRIPT, *flags], Path.cwd(), {**os.environ, **environment})
    out, err = done.stdout.read(), done.stderr.read()
    assert done.wait() == 0, err
    return out


def test_without_a_gpu_it_says_so():
    assert "no GPU here" in play(CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
def test_the_same_code_runs_on_a_processor():
    rows = json.loads(play("--device", "cpu", "--tiny", "--seconds", "1", "--block", "0.1", "--json"))["rows"]
    assert [row["peer"] for row in rows] == ["plain loop", "DDP", "FSDP2"]
    assert all(row["loss_difference"] < 1e-2 for row in rows)
