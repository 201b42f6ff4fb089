"""Stages cut by what their blocks take: found where matrices do not tell, and alike on all ranks."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.parallel.uneven import TIMES, uneven
from tests.train.test_stages import on_ranks, trained, whole
from unisono.comm.mesh import Mesh, Shape
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.observe.span import Recorder
from unisono.parallel.cut import cut
from unisono_contrib.comm import threads
from unisono_contrib.parallel.measured import measured_costs

TOKENS = torch.empty(4, 16, dtype=torch.int64, device="meta")


def measured(rank=0, ranks=1):
    mesh = Mesh(Shape(pp=ranks), rank, Recorder(rank), timedelta(seconds=60))
    with torch.device("meta"):
        model = uneven(50, 16)
    costs = measured_costs(model, TOKENS, mesh.world, dtype=torch.float64, device=torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    return costs


def test_what_repeats_its_product_costs_more():
    blocks, stem, head = measured()
    assert len(blocks) == len(TIMES) and min(*blocks, stem, head) > 0
    assert min(blocks[6:]) > 4 * max(blocks[:6])


def test_all_ranks_agree_and_cut_alike():
    one, *others = threads.run(3, lambda rank: measured(rank, 3))
    assert all(other == one for other in others)
    model = uneven(50, 16)
    assert [len(part) for part in cut(model, 2)] == [5, 3]  # as their matrices say, with the head
    assert [len(part) for part in cut(model, 2, lambda: one)] == [7, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:v=2,cut=measured", "zbv:cut=measured"])
def test_how_a_model_is_cut_changes_no_bit(tmp_path, schedule):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 20)
    recipe = Recipe(
        model=ModelConfig(kind=f"{Path(__file__).with_name('uneven.py')}:uneven", context=6),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(steps=2, global_batch=4, micro_batch=1, dtype="float64"),
    )
    wanted = whole(on_ranks(recipe, "pp=2", "1f1b:cut=measured", trained))
    assert whole(on_ranks(recipe, "pp=2", schedule, trained)) == wanted
