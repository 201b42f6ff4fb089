"""The tables of `benchmarks/slow_links.py`: bounds and verdicts, as functions of numbers."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from unisono.codecs import CODECS

ROOT = Path(__file__).parents[2]
SHAPES = ((256, 1024), (1024, 256), (256,))


@pytest.fixture(scope="module")
def slow_links() -> Any:
    spec = importlib.util.spec_from_file_location("slow_links", ROOT / "benchmarks" / "slow_links.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("world", [2, 4, 7])
@pytest.mark.parametrize(
    "codec", ["plain", "cast:bf16", "int8", "int4+ef", "powersgd:r=4+ef", "topk:ratio=0.01+ef"]
)
def test_no_codec_declares_less_than_its_bound(slow_links: Any, codec: str, world: int) -> None:
    least = slow_links.bound(codec, SHAPES, world)
    declared = CODECS.read(codec).work(SHAPES, 4, world).sent
    assert 0.999 * least - 64 <= declared <= 1.25 * least


def test_the_bound_of_top_k_counts_what_goes_whole_as_a_sum(slow_links: Any) -> None:
    """256 biases of 4 bytes, summed; of matrices a hundredth of the elements, of 6 bytes, to three others."""
    least = slow_links.bound("topk:ratio=0.01,kind=chunked+ef", SHAPES, 4)
    assert least == pytest.approx(3 * 6 * 0.01 * 2 * 256 * 1024 + 1.5 * 4 * 256)
    bare = slow_links.bound("topk:ratio=0.01,kind=chunked+ef", SHAPES, 4, whole=False)
    assert bare == pytest.approx(3 * 6 * 0.01 * (2 * 256 * 1024 + 256))


def test_auto_may_be_slower_than_plain_by_chance_alone(slow_links: Any) -> None:
    row = {"way": "auto", "payload_ratio": 1.0, "ratio_vs_plain_p05": 0.98}
    assert slow_links.judged(row)["met"] is True
    assert slow_links.judged({**row, "ratio_vs_plain_p05": 1.02})["met"] is False


def test_what_is_not_there_is_named(slow_links: Any) -> None:
    found, missing = slow_links.there(["plain", "nobody", "int8:colour=red"])
    assert found == ["plain"]
    assert "nobody" in missing["nobody"]
    assert "colour" in missing["int8:colour=red"]


@pytest.mark.parametrize(
    ("payload", "bound", "time", "rate", "met"),
    [
        (0.25, 1.1, 0.32, 1e8, True),
        (0.29, 1.1, 0.32, 1e8, False),
        (0.25, 1.2, 0.32, 1e8, False),
        (0.25, 1.1, 0.40, 1e8, False),
        (0.25, 1.1, 0.40, 1e9, True),  # at 1 Gbit/s nothing is asked of the time
    ],
)
def test_verdicts(slow_links: Any, payload: float, bound: float, time: float, rate: float, met: bool) -> None:
    row = {
        "way": "int8", "payload_ratio": payload, "bound_ratio": bound, "ratio_vs_ddp": time, "rate_bit_s": rate,
    }  # fmt: skip
    assert slow_links.judged(row)["met"] is met
    assert slow_links.judged({**row, "way": "plain"})["met"] is None


def test_a_cell_has_a_row_and_a_line_for_each_way(slow_links: Any) -> None:
    """DDP counts no payload of its own; what it sends is the sum's."""

    def took(seconds: float, payload: float) -> dict[str, list[float]]:
        return {"seconds": [seconds] * 3, "device": [2e6 * seconds] * 3, "payload": [payload] * 3}

    dense = slow_links.bound("plain", SHAPES, 2)
    got = {
        "took": {"DDP fp32": took(2.0, -1.0), "plain": took(1.9, dense), "int8": took(0.5, dense / 4)},
        "shapes": SHAPES, "compute": 0.1, "load": 0.0,
    }  # fmt: skip
    rows = [slow_links.row_of(name, got, 1e8, 2, "3M") for name in got["took"]]
    assert [row["ratio_vs_ddp"] for row in rows] == [1.0, 0.95, 0.25]
    assert [row["payload_ratio"] for row in rows] == [1.0, 1.0, 0.25]
    assert rows[2]["met"] is True
    lines = slow_links.table(rows)
    assert len(lines) == 4
    assert lines[3].count(" yes") == 3
