"""What the GPU benchmark does where there is no GPU: says so, and can be tried on a processor."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.gpu_all import checked
from tests.forked import Forked

pytestmark = pytest.mark.timeout(300)

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "gpu.py")


def play(*flags: str, code: int = 0, **environment: str) -> str:
    done = Forked([SCRIPT, *flags], Path.cwd(), {**os.environ, **environment})
    out, err = done.stdout.read(), done.stderr.read()
    assert done.wait() == code, err or out
    return out


def test_without_a_gpu_it_says_so():
    assert "no GPU here" in play(CUDA_VISIBLE_DEVICES="")


def test_without_a_gpu_no_row_has_run_and_each_says_why():
    rows = json.loads(play("--all", "--json", code=3, CUDA_VISIBLE_DEVICES=""))["rows"]
    assert {(row["state"], row["says"]) for row in rows} == {("not run", "no NVIDIA GPU here")}
    assert {"NCCL suite", "speed, one device", "memory against ledger", "a killed rank"} <= {
        row["what"] for row in rows
    }


@pytest.mark.slow
def test_each_row_is_rehearsed_on_a_simulated_device():
    rows = json.loads(play("--all", "--device", "sim", "--json"))["rows"]
    assert {row["state"] for row in rows} == {"ok"} and len(rows) == 8


def row(check):
    return checked("it", check)


def raises():
    raise ValueError("what is wrong\nmore of it")


def test_a_row_that_does_not_hold_or_raises_has_failed():
    assert (row(lambda: (True, "1.0")).state, row(lambda: (False, "2.0")).state) == ("ok", "failed")
    assert (row(raises).state, row(raises).says) == ("failed", "ValueError: what is wrong")


@pytest.mark.slow
def test_the_same_code_runs_on_a_processor():
    rows = json.loads(play("--device", "cpu", "--tiny", "--seconds", "1", "--block", "0.1", "--json"))["rows"]
    assert [row["peer"] for row in rows] == ["plain loop", "DDP", "FSDP2"]
    assert all(row["loss_difference"] < 1e-2 for row in rows)
