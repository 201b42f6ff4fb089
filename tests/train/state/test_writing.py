"""Run folders have one writer at a time."""

import os
import signal
from pathlib import Path

import pytest

from unisono.spec.errors import UsageError
from unisono.train.state.writing import locked


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with locked(tmp_path):
        with (
            pytest.raises(UsageError, match="another run writes into this folder") as caught,
            locked(tmp_path, 0.1),
        ):
            pass
        assert caught.value.code == "O02" and caught.value.exit == 2 and str(tmp_path) in caught.value.where
    with locked(tmp_path, 0.0):
        pass
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_whoever_is_killed_lets_go(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(tmp_path):
            os.write(writes, b"x")
            signal.pause()
    os.read(reads, 1)
    os.kill(child, signal.SIGKILL)
    with locked(tmp_path, 10.0):
        os.waitpid(child, 0)
    os.close(reads), os.close(writes)
