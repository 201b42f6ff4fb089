"""Two hosts of a lab whose clocks are 3 s before and behind, and drift: a run has both on one clock."""

import shutil
from pathlib import Path

import pytest

from tests.launch.clocks import played

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        not (shutil.which("ip") and shutil.which("tc")), reason="SKIPPED: no ip and tc (iproute2) here"
    ),
]


def test_seconds_and_drift_are_taken_out(tmp_path: Path) -> None:
    for sign, one in zip((-1, 1), played(tmp_path, seconds=40.0, shift=3.0, drift=50.0), strict=True):
        assert sign * one.own == pytest.approx(3e6, abs=1e5), "the clocks were wrong indeed"
        assert one.most < 200 and one.steps > 20
