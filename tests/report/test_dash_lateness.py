"""A tile shows the largest lateness of what lies under each of its pixels, whatever its size and the order of ranks."""

import numpy as np
import pytest

from unisono.report.calls import StepCalls, rank_step
from unisono_contrib.report.dash import chain
from unisono_contrib.report.dash.lateness import NONE, TILE, LatenessMap


def row(rank: int, step: int, late: float = 0.0, waited: float = 0.0) -> dict:
    """A line of events in which a rank comes late to the second of two buckets."""
    calls = [
        ["dp", "all_reduce", 8, "backward", "blocks.1", 0.05, 0.07, 0.06, 0],
        ["dp", "all_reduce", 8, "backward", "stem", 0.08 + late, 0.09 + max(late, waited), 0.08 + late, 1],
    ]
    time = {"data": 0.0, "forward": 0.02, "backward": 0.06 + late, "comm_exposed": waited, "wait": 0.0}
    return {"kind": "step", "step": step, "rank": rank, "time": time, "start": 100.0 + step, "calls": calls}


def filled(ranks: int, steps: int, late: dict[tuple[int, int], float]) -> LatenessMap:
    drawn = LatenessMap()
    drawn.places = {rank: {"dp": rank} for rank in range(ranks)}
    for rank in range(ranks):
        drawn.put(rank, [row(rank, step, late.get((rank, step), 0.0)) for step in range(1, steps + 1)])
    drawn.settle(steps)
    return drawn


def cells(tile: bytes) -> tuple[np.ndarray, np.ndarray, float, tuple[int, ...]]:
    """(ranks of the rows, the pixels, seconds of the darkest, (top, bottom, first, last))."""
    _, rows, columns, top, bottom, first, last, scale, _ = TILE.unpack_from(tile)
    order = np.frombuffer(tile, np.uint16, (bottom - top + 1) * bool(rows), TILE.size)
    pixels = np.frombuffer(tile, np.uint8, rows * columns, TILE.size + order.nbytes).reshape(rows, columns)
    return order, pixels, scale, (top, bottom, first, last)


def test_it_is_the_lateness_that_the_report_knows() -> None:
    drawn = filled(4, 3, {(2, 2): 0.2})
    lines = {rank: rank_step(rank, row(rank, 2, 0.2 if rank == 2 else 0.0)) for rank in range(4)}
    known = StepCalls(2, {r: one for r, one in lines.items() if one}, drawn.places).lateness
    assert drawn.window(2, 2)[:, 0] == pytest.approx([known[rank] for rank in range(4)])
    assert drawn.window(2, 2)[2, 0] == pytest.approx(0.2, abs=1e-6) and drawn.by_calls


@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 3), (100, 10), (1600, 400)])
def test_no_late_step_is_lost_at_any_size(width: int, height: int) -> None:
    drawn = filled(10, 700, {(7, 333): 0.2})
    order, pixels, scale, _ = cells(drawn.tile((0, 9), (1, 700), width, height))
    assert pixels.shape[0] <= height and pixels.shape[1] <= width and list(order) == [*range(10)]
    assert scale == pytest.approx(0.2, abs=1e-4) and pixels[pixels != NONE].max() == 254


def test_a_window_holds_what_lies_in_it_alone() -> None:
    drawn = filled(10, 700, {(7, 333): 0.2, (3, 20): 0.4})
    _, pixels, scale, window = cells(drawn.tile((6, 8), (330, 340), 50, 50))
    assert window == (6, 8, 330, 340) and pixels.shape == (3, 11)
    assert np.argwhere(pixels == 254).tolist() == [[1, 3]] and scale == pytest.approx(0.2, abs=1e-4)


def test_the_latest_rank_comes_first() -> None:
    order, *_ = cells(
        filled(10, 100, {(7, 50): 0.2, (3, 20): 0.4}).tile((0, 9), (1, 100), 50, 50, by_cost=True)
    )
    assert list(order[:2]) == [3, 7] and sorted(order) == [*range(10)]


def test_steps_of_which_a_rank_is_missing_wait_for_it_but_not_for_ever() -> None:
    drawn = LatenessMap()
    for rank in range(3):
        drawn.put(rank, [row(rank, step) for step in range(1, 11 if rank < 2 else 6)])
    drawn.settle(0)
    assert drawn.unread(1, 10) == [6, 7, 8, 9, 10]
    drawn.settle(8)
    assert drawn.unread(1, 10) == [9, 10]


def test_lines_without_calls_have_their_work_beside_the_median() -> None:
    drawn = LatenessMap()
    for rank in range(3):
        drawn.put(rank, [{"step": 1, "time": {"forward": 0.1 + 0.05 * (rank == 1), "wait": 0.3}}])
    drawn.settle(1)
    assert drawn.window(1, 1)[:, 0] == pytest.approx([0.0, 0.05, 0.0]) and not drawn.by_calls


def test_nothing_known_is_an_empty_tile() -> None:
    _, pixels, *_ = cells(LatenessMap().tile((0, 10), (0, 10), 100, 100))
    assert pixels.size == 0


def test_the_chain_goes_from_the_call_to_the_part_to_the_module() -> None:
    lines = {rank: row(rank, 5, 0.2 if rank == 2 else 0.0, 0.0 if rank == 2 else 0.2) for rank in range(4)}
    for rank, line in lines.items():
        line["modules"] = {"blocks.1.mlp": [0.004, 0.21 if rank == 2 else 0.01], "stem": [0.001, 0.001]}
    places = {rank: {"dp": rank} for rank in range(4)}
    facts = chain.chain(2, 5, lines, places)
    kinds = [link["kind"] for link in facts["links"]]
    assert kinds == ["call", "part", "module"]
    assert "of stem, in backward: 3 ranks waited 200 ms at most" in facts["links"][0]["said"]
    assert (
        facts["links"][1]["said"].startswith("longer in backward than")
        and "blocks.1.mlp" in facts["links"][2]["said"]
    )
    assert facts["late_s"] == pytest.approx(0.2) and facts["ranks"][0][0] == 2
    assert facts["said"].startswith("Rank 2 was 200 ms late in step 5: 200 ms longer in backward than")


def test_a_rank_in_time_has_nobody_to_blame() -> None:
    lines = {rank: row(rank, 5) for rank in range(4)}
    facts = chain.chain(1, 5, lines, {})
    assert [link["kind"] for link in facts["links"]] == ["call"]
    assert chain.chain(9, 5, lines, {})["said"] == "Nothing was written of it."
