"""The journal: every step reaches every observer once and in order, however they come together."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.observe.span import PARTS, Recorder
from unisono.spec.sink import Observer, StepRecord
from unisono.sync import Verdict
from unisono.train.step.update import Report
from unisono.train.watch.journal import EVERY, Journal, LiveTable


class Heard(Observer):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.calls: list[int] = []
        self.ends: list[int] = []
        self.closed = 0

    def observe(self, steps: Sequence[StepRecord]) -> None:
        self.calls.append(len(steps))
        self.steps += [record.step for record in steps]

    def ended(self, step: int, stop: bool) -> None:
        self.ends.append(step)

    def close(self) -> None:
        self.closed += 1


def report(step: int, **more: object) -> Report:
    return Report(step, 1.5, 0.5, 1e-3, Verdict.APPLY, **more)  # type: ignore[arg-type]


@given(pauses=st.lists(st.floats(0.0, 2 * EVERY), max_size=20))
def test_steps_arrive_once_and_in_order(pauses):
    clock = [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unisono.train.watch.journal.time.monotonic", lambda: clock[0])
        heard = [Heard(), Heard()]
        journal = Journal(heard, tokens=10)
        for step, pause in enumerate(pauses):
            clock[0] += pause
            journal.add(report(step), Recorder(0).lap(), 0.25)
        journal.close()
    for each in heard:
        assert each.steps == each.ends == list(range(1, len(pauses) + 1))
        assert 0 not in each.calls and each.closed == 1
    slow = 1 + sum(pause >= EVERY for pause in pauses)
    assert len(heard[0].calls) <= slow + int(sum(pauses) / EVERY) + 1


@pytest.mark.parametrize("more", [{"stop": True}, {"loss": float("nan"), "finite": False}])
def test_the_last_step_is_told_at_once(more):
    heard = Heard()
    journal = Journal([heard], tokens=10)
    for step in range(3):
        journal.add(report(step), Recorder(0).lap(), 0.25)
    last = Report(**{"step": 3, "loss": 1.0, "norm": 1.0, "lr": 1.0, "verdict": Verdict.APPLY, **more})
    journal.add(last, Recorder(0).lap(), 0.25)
    assert heard.steps == [1, 2, 3, 4]


def test_the_live_table_hears_the_latest_that_a_policy_said():
    class Line:
        def send(self, kind: str, **fields: object) -> None:
            sent.append(fields)

    def record(step: int, **says: object) -> StepRecord:
        return StepRecord(step, 1.5, 1e-3, 0.5, 10, 0.25, {}, {}, 300.0, says)

    sent: list[dict] = []
    table = LiveTable(Line(), 9, 0)  # type: ignore[arg-type]
    table.observe([record(1, consensus=0.5, staleness=1.0), record(2, staleness=2.0, scale=2.0), record(3)])
    table.observe([record(4, staleness=None)])
    assert [fields.get("instruments") for fields in sent] == [{"consensus": 0.5, "staleness": 2.0}, None]


def test_what_a_validation_finds_stands_with_its_step():
    told: list[StepRecord] = []

    class Kept(Heard):
        def observe(self, steps: Sequence[StepRecord]) -> None:
            told.extend(steps)

    journal = Journal([Kept()], tokens=10)
    journal.beside({"val_loss": 9.0})  # of no step
    for step in range(3):
        journal.add(report(step, says={"scale": 2.0}), Recorder(0).lap(), 0.25, more=step == 1)
        if step == 1:
            assert len(told) <= 1
            journal.beside({"val_loss": 3.0})
    journal.close()
    assert [one.says for one in told] == [{"scale": 2.0}, {"scale": 2.0, "val_loss": 3.0}, {"scale": 2.0}]


def test_a_record_adds_up():
    recorder = Recorder(0)
    with recorder.span("forward"):
        pass
    record = Journal([], tokens=64)._record(report(7), recorder.lap(), 0.5, 1.0, 3.0)
    assert (record.step, record.tokens, record.seconds) == (8, 64, 0.5)
    assert set(record.times) == set(PARTS)
    assert sum(record.times.values()) == pytest.approx(0.5, abs=1e-4)


def test_the_live_table_hears_of_the_last_step_only():
    sent: list[dict[str, object]] = []

    class Line:
        def send(self, kind: str, **fields: object) -> None:
            sent.append({"kind": kind, **fields})

        def stop_requested(self) -> bool:
            return False

        def rendezvous(self, error: BaseException) -> None:
            return None

    journal = Journal([LiveTable(Line(), 9, 1)], tokens=100)
    for step in range(3):
        journal.add(report(step, stop=step == 2), Recorder(0).lap(), 0.5)
    assert [(each["step"], each["steps"], each["stage"]) for each in sent][-1] == (3, 9, 1)
    assert sent[-1]["tokens_per_s"] == 200.0
