import itertools
import subprocess
import sys
import threading
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.observe.span import PARTS, Payload, Recorder


class Clock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def test_a_span_owns_its_time_less_what_is_inside() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    with recorder.span("backward"):
        clock.now += 10
        with recorder.span("wait", axis="pp"):
            clock.now += 30
        clock.now += 5
    assert recorder.totals() == pytest.approx({"backward": 15e-9, "wait": 30e-9})


def test_hidden_communication_is_taken_from_nobody() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    with recorder.span("backward"):
        clock.now += 100
        recorder.add("comm", 20, 80, exposed=False)
        recorder.add("comm", 80, 100)
    assert recorder.totals() == pytest.approx(
        {"backward": 80e-9, "comm_exposed": 20e-9, "comm_hidden": 60e-9}
    )


@given(st.recursive(st.integers(1, 50), lambda inner: st.lists(inner, max_size=4), max_leaves=12))
def test_parts_add_up_to_the_wall_time(tree: object) -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)

    def walk(node: object, depth: int) -> None:
        with recorder.span(PARTS[depth % 3]):
            if isinstance(node, int):
                clock.now += node
            else:
                for child in node:  # pyright: ignore
                    walk(child, depth + 1)
            clock.now += 1

    walk(tree, 0)
    assert sum(recorder.totals().values()) == pytest.approx(clock.now * 1e-9)


def test_spans_are_kept_on_demand_and_drained_once() -> None:
    recorder = Recorder(rank=3)
    with recorder.span("data"):
        pass
    recorder.keep, recorder.step = True, 7
    with recorder.span("forward", micro=1, stage=0):
        pass
    (span,) = recorder.take()
    assert (span.kind, span.tags) == ("forward", {"micro": 1, "stage": 0, "step": 7})
    assert span.stop_ns >= span.start_ns
    assert recorder.take() == []
    assert set(recorder.totals()) == {"data", "forward"}


def test_a_lap_holds_what_happened_since_the_last() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    for nbytes in (100, 250):
        with recorder.span("optim"):
            clock.now += nbytes
        recorder.count("dp", "all_reduce", nbytes)
        lap = recorder.lap()
        assert lap.seconds == pytest.approx({"optim": nbytes * 1e-9})
        assert lap.nbytes == {("dp", "all_reduce"): nbytes}
    assert recorder.bytes() == {("dp", "all_reduce"): 350}
    assert recorder.lap().nbytes == {}


def test_the_ledger_tells_bytes_by_algorithm_and_codec() -> None:
    recorder = Recorder()
    recorder.count("dp", "all_reduce", 5, "ring")
    recorder.codec = "int8"
    recorder.count("dp", "all_reduce", 7, "ring")
    recorder.codec = ""
    recorder.count("pp", "send", 2)
    told = {
        Payload("dp", "all_reduce", "ring"): 5,
        Payload("dp", "all_reduce", "ring", "int8"): 7,
        Payload("pp", "send"): 2,
    }
    assert recorder.ledger() == told == recorder.lap().ledger
    assert recorder.bytes() == {("dp", "all_reduce"): 12, ("pp", "send"): 2}
    recorder.count("pp", "send", 3)
    assert recorder.lap().ledger == {Payload("pp", "send"): 3}


def test_a_span_ends_when_its_body_raises() -> None:
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.span("forward"):
        raise KeyError
    with recorder.span("optim"):
        pass
    assert set(recorder.totals()) == {"forward", "optim"}


@pytest.mark.timeout(20)
def test_counts_from_several_threads_are_not_lost() -> None:
    recorder = Recorder()

    def work() -> None:
        for _ in range(2000):
            recorder.count("dp", "send", 1)
            recorder.add("comm", 0, 1, exposed=False)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.bytes() == {("dp", "send"): 8000}
    assert recorder.totals() == pytest.approx({"comm_hidden": 8000e-9})


def test_a_span_that_is_not_kept_is_cheap() -> None:
    recorder = Recorder()

    def once() -> None:
        with recorder.span("forward", micro=1):
            pass

    # About 1 µs on an idle core; the bound leaves room for a machine that is busy with other things.
    assert min(timeit.repeat(once, number=500, repeat=20)) / 500 < 5e-6


def test_the_observers_import_no_torch() -> None:
    names = "span, trace, metrics, memory, environment"
    code = f"import sys; from unisono.observe import {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_process_put_aside_between_two_clocks_does_not_shift_its_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays = itertools.chain([7_000_000, 0, 0, 0, 3_000_000], itertools.repeat(0))
    monkeypatch.setattr("unisono.observe.span.time.time_ns", lambda: 10**18)
    assert Recorder(clock=lambda: next(delays) + 50).epoch_ns == 10**18 - 50
