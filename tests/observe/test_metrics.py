"""Lines of JSON: what is written is read, whatever was half written, and steps that will be made again are gone."""

import json
import math
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unisono.observe import memory
from unisono.observe.metrics import JsonLines, forget_after, plain, read_lines, read_steps

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), max_size=6)
QUIET = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUIET
@given(RECORDS, st.integers(0, 30))
def test_what_is_written_is_read_and_half_a_line_spoils_only_itself(tmp_path: Path, records, torn):
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    half = json.dumps({"torn": "x" * 30})[: torn + 1]
    path.write_text(half)
    with JsonLines(path) as lines:
        lines.write(*records)
    read, damaged = read_lines(path)
    assert damaged == 1 and read == [json.loads(json.dumps(plain(record))) for record in records]


@given(VALUES)
def test_plain_is_json_and_keeps_what_json_has_words_for(value):
    json.dumps(plain(value), allow_nan=False)
    if not isinstance(value, float) or math.isfinite(value):
        assert plain(plain(value)) == plain(value)


@QUIET
@given(st.lists(st.integers(1, 9), max_size=10), st.integers(0, 9))
def test_steps_from_where_a_run_goes_on_are_forgotten(tmp_path: Path, steps, first):
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    with JsonLines(path) as lines:
        lines.write({"kind": "info"}, *({"step": step} for step in steps))
    forget_after(path, first)
    assert read_lines(path) == ([{"kind": "info"}, *({"step": step} for step in steps if step <= first)], 0)


def test_a_run_of_long_ago_is_counted_from_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"kind": "info"}, *({"step": step} for step in range(5)))
    assert [line.get("step") for line in read_steps(path)[0]] == [None, 1, 2, 3, 4, 5]
    forget_after(path, 3)  # resumed after three steps: from now on it is written as it is read
    assert [line.get("step") for line in read_lines(path)[0]] == [None, 1, 2, 3]


def test_the_peak_of_memory_is_no_less_than_what_is_held():
    held = memory.rss_mib()
    block = bytearray(64 << 20)
    assert memory.peak_rss_mib() >= memory.rss_mib() * 0.999 > 0.0 < held
    assert len(block) == 64 << 20
