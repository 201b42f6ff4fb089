"""What a rank under faults does to itself, without a run around it."""

import time
from pathlib import Path

import pytest

from unisono_contrib.programs.chaos.script import read
from unisono_contrib.train.recovery.scripted_faults import of_script


def test_a_slow_rank_computes_longer_and_its_waits_are_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slept = [0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 9))
        now[0] += round(seconds * 1e9)

    monkeypatch.setattr(time, "sleep", sleep)
    script = read("slow:who=1:step=2:times=5:leaf=0.5:seconds=1000", 2, 9)
    recorder = of_script(script.as_text(), tmp_path, 1).recorder(1)
    monkeypatch.setattr(recorder, "_clock", lambda: now[0])
    for step in (1, 2):
        recorder.step = step
        with recorder.span("data"):
            now[0] += 10**9
        with recorder.span("forward", micro=0, stage=0):
            now[0] += 10**9
        with recorder.span("backward", micro=0, stage=0):
            now[0] += 2 * 10**9
            with recorder.span("wait"):
                now[0] += 7 * 10**9
        with recorder.span("backward", op="close"):
            now[0] += 10**9
    assert slept == [4.5, 8.0], "four times the computing more, and half a second a micro-batch"
    totals = recorder.totals()
    assert totals["forward"] == pytest.approx(2 + 4.5) and totals["backward"] == pytest.approx(4 + 8 + 2)
    assert totals["wait"] == pytest.approx(14) and totals["data"] == pytest.approx(2)
