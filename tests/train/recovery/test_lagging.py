"""A part of a step that lags, once a step, in a module if one is named; a clock that is wrong and drifts."""

import time
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unisono.spec.errors import UsageError
from unisono_contrib.programs.chaos.script import read
from unisono_contrib.train.recovery.scripted_faults import ScriptedFaults


class Rank:
    """One rank under a script, whose sleeps are written down instead."""

    def __init__(self, script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept: list[float] = []
        monkeypatch.setattr(time, "sleep", self.slept.append)
        self.faults = ScriptedFaults(read(script, 2, 99), folder, 1)
        self.recorder = self.faults.recorder(1)
        self.model = nn.Sequential(OrderedDict(stem=nn.Linear(2, 2), head=nn.Linear(2, 2)))
        self.faults._run = SimpleNamespace(local=SimpleNamespace(stages={0: self.model}))  # type: ignore[assignment]

    def step(self, number: int, micros: int = 2) -> list[float]:
        self.slept.clear()
        self.recorder.step = number
        with self.recorder.span("data"):
            pass
        for micro in range(micros):
            with self.recorder.span("forward", micro=micro, stage=0):
                y = self.model(torch.ones(1, 2))
            with self.recorder.span("backward", micro=micro, stage=0):
                y.sum().backward()
        with self.recorder.span("backward", op="close"):
            pass
        for _ in range(2):
            with self.recorder.span("optim"):
                pass
        return [seconds for seconds in self.slept if seconds]


@pytest.mark.parametrize("part", ["data", "forward", "backward", "optim"])
def test_once_a_step_from_its_step_on(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(f"lag:who=1:step=2:part={part}:leaf=0.25", tmp_path, monkeypatch)
    assert [rank.step(number) for number in (1, 2, 3)] == [[], [0.25], [0.25]]


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_in_a_module(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(f"lag:who=1:step=2:part={part}:module=head:leaf=0.25", tmp_path, monkeypatch)
    rank.step(1)
    grads = [p.grad.clone() for p in rank.model.parameters() if p.grad is not None]
    rank.model.zero_grad()
    assert rank.step(2) == [0.25], "once, whatever the number of micro-batches"
    assert all(
        torch.equal(p.grad, g)
        for p, g in zip(rank.model.parameters(), grads, strict=True)
        if p.grad is not None
    )


def test_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank("lag:who=1:step=1:part=optim:leaf=0.25:seconds=5", tmp_path, monkeypatch)
    assert rank.step(1) == [0.25]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 6)
    assert rank.step(2) == []


@pytest.mark.parametrize(
    "script",
    [
        "lag:step=1:part=lunch",
        "lag:step=1:part=data:module=head",
        "slow:step=1:part=data",
        "lag:step=1:module=3",
    ],
)
def test_mistakes(script: str) -> None:
    with pytest.raises(UsageError):
        read(script, 2, 9)


def test_a_clock_that_drifts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    monkeypatch.setattr(time, "time", time.time)
    true = time.clock_gettime_ns(time.CLOCK_REALTIME)
    rank = Rank("clock:who=1:step=1:seconds=3:drift=50", tmp_path, monkeypatch)
    rank.step(1)
    here = rank.recorder.host_clock.here_ns(rank.recorder.now_ns())
    assert here - true == pytest.approx(3e9, abs=1e9) and abs(time.time_ns() - here) < 5e7
    begun, later = (rank.recorder.host_clock.skew(rank.recorder.now_ns() + s * 10**9) for s in (0, 100))
    assert later - begun == pytest.approx(100 * 50e-6 * 1e9, rel=1e-3)
