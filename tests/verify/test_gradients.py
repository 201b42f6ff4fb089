"""What is wrong with a gradient that lies in halves on two ranks of tp, each of them on two replicas."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unisono.verify.evidence import Evidence, RecordedBox, only_at
from unisono.verify.gradients import explain

RIGHT = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def held(change: Callable[[int, int, Tensor], Tensor]) -> list[RecordedBox]:
    """change(dp, tp, right half): what that rank has."""
    return [
        RecordedBox(
            2 * dp + tp, {"dp": dp, "tp": tp}, (4 * tp, 0), change(dp, tp, RIGHT[4 * tp : 4 * tp + 4])
        )
        for dp in range(2)
        for tp in range(2)
    ]


@pytest.mark.parametrize(
    ("cause", "words", "change"),
    [
        ("wrong_group", "ranks along tp hold", lambda dp, tp, x: RIGHT[:4] + RIGHT[4:]),
        ("not_reduced", "over the dp axis", lambda dp, tp, x: (0.3, 0.7)[dp] * x if tp else x),
        ("not_reduced", "over the dp axis", lambda dp, tp, x: (0.3, 0.7)[dp] * x),
        ("factor", "3 times the right one", lambda dp, tp, x: 3.0 * x),
        ("factor", "-7.0e-06 off, all by the same share: nothing is missing", lambda dp, tp, x: 0.999993 * x),
        ("rank_slice", "tp 1", lambda dp, tp, x: x + tp * torch.arange(3)),
        ("replicas_drifted", "right on ranks 0, wrong on 2", lambda dp, tp, x: x + dp * torch.arange(3)),
    ],
)  # fmt: skip
def test_it_is_named(cause: str, words: str, change: Callable[[int, int, Tensor], Tensor]):
    evidence = Evidence({"a": RIGHT}, {"a": held(change)}, ("dp", "tp"), {}, 1e-12, {})
    found = explain(evidence, ["a"])
    assert found.name == cause and words in found.text, found


def test_what_is_wrong_at_some_places_alone_is_told_by_the_axis_that_parts_them():
    boxes = held(lambda dp, tp, x: x)
    assert only_at(boxes, ("dp", "tp"), lambda box: box.at["tp"] == 1) == "tp 1"
    assert only_at(boxes, ("dp", "tp"), lambda box: box.rank == 3) == ""
    assert only_at(boxes, ("dp", "tp"), lambda box: True) == ""
