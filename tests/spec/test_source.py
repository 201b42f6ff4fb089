"""What runs on a source count."""

import pytest

from unisono.spec.source import counted_in


@pytest.mark.parametrize(
    ("source", "unit"),
    [
        ("stdlib", "tokens"),
        ("text:books/*.txt", "tokens"),
        ("mixture:0.7*text:a + 0.3*jsonl:b", "tokens"),
        ("digits", "samples"),
        ("images:photos", "samples"),
        ("mine.py:Own", "tokens"),
    ],
)
def test_text_is_counted_in_tokens_and_all_else_in_samples(source: str, unit: str) -> None:
    assert counted_in(source) == unit
