"""What the host did to a thread: its seconds with a core, garbage collection, and what lies between steps."""

import gc
import sys
import time

import pytest

from unisono.observe.host_time import HostMeter


def _busy(seconds: float) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        pass


def test_a_lap_counts_the_core_and_not_the_sleep() -> None:
    meter = HostMeter()
    try:
        meter.begin()
        _busy(0.05)
        time.sleep(0.02)
        lap = meter.lap(0.07)
        assert 0.045 <= lap["cpu_s"] < 0.069
        assert lap["gc_s"] >= 0 and "between_s" not in lap
        if sys.platform == "linux":
            assert lap["queue_s"] >= 0 and lap["faults"] >= 0
    finally:
        meter.close()


def test_collections_are_counted_wherever_they_fall_and_no_more_after_closing() -> None:
    meter, before = HostMeter(), len(gc.callbacks)
    keep = [{"a": [i]} for i in range(50_000)]
    meter.begin()
    gc.collect()
    inside = meter.lap(0.1)["gc_s"]
    gc.collect()
    meter.begin()
    assert inside > 0 and meter.lap(0.1)["gc_s"] > 0
    meter.close()
    assert len(gc.callbacks) == before - 1 and len(keep) == 50_000


def test_what_lies_between_two_steps_is_told_with_the_second() -> None:
    meter = HostMeter()
    try:
        meter.lap(0.0)
        _busy(0.03)
        meter.spent("save_s", 0.01)
        meter.begin()
        begun = time.perf_counter()
        _busy(0.01)
        lap = meter.lap(time.perf_counter() - begun)
        assert lap["between_s"] >= 0.03 and lap["save_s"] == pytest.approx(0.01) and "eval_s" not in lap
        assert "save_s" not in meter.lap(0.0)
    finally:
        meter.close()
