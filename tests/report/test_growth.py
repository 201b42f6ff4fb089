"""Speed-up, efficiency and advice by runs of several sizes."""

import pytest

from unisono_contrib.report.growth import GrowthPoint, advice, rows, said


def points(*sizes: tuple[int, float, float], kind: str = "strong") -> list[GrowthPoint]:
    """(ranks, seconds a step, of these of communication)"""
    return [
        GrowthPoint(n, kind, 32 * (n if kind == "weak" else 1), period, moving) for n, period, moving in sizes
    ]


def test_efficiency_is_beside_the_smallest_size_of_its_kind() -> None:
    table = rows(
        [
            *points((1, 1.0, 0.0), (2, 0.6, 0.1), (4, 0.5, 0.25)),
            *points((1, 1.0, 0.0), (4, 1.25, 0.2), kind="weak"),
        ]
    )
    assert [row["speedup"] for row in table] == pytest.approx([1, 1 / 0.6, 2, 1, 3.2])
    assert [row["efficiency"] for row in table] == pytest.approx([1, 1 / 1.2, 0.5, 1, 0.8])


def test_a_size_that_failed_has_its_reason_and_no_figures() -> None:
    table = rows([*points((1, 1.0, 0.0)), GrowthPoint(2, "strong", 32, why="error U-P11")])
    assert table[1]["speedup"] is None and "error U-P11" in said(table)[-1]


def test_accumulation_is_advised_until_communication_is_a_twentieth() -> None:
    accumulation, frequency, batch = advice(points((1, 1.0, 0.0), (4, 0.5, 0.25)), noise_scale=1000.0)
    assert (
        "19 times" in accumulation and "--train.global_batch 608" in accumulation and "5.0 %" in accumulation
    )
    assert "local_sgd:h=19" in frequency and "LOSSY" in frequency
    assert "below the noise scale" in batch


def test_a_batch_above_the_noise_scale_is_said_to_waste_samples() -> None:
    accumulation, _, batch = advice(points((1, 1.0, 0.0), (4, 0.5, 0.25)), noise_scale=20.0)
    assert "wastes samples" in accumulation and "above the noise scale" in batch


def test_nothing_is_advised_where_there_is_nothing_to_gain() -> None:
    assert (
        "nothing to gain" in advice(points((1, 1.0, 0.0), (2, 0.5, 0.01)), None, "no second micro-batch")[0]
    )
    assert advice([GrowthPoint(1, "strong", 32, why="no")], None) == []
