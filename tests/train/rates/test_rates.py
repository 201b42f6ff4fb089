"""Learning rates: what each schedule gives at its corners, and which keys of `[train]` it has."""

import pytest

from unisono.config import Recipe, TrainConfig, resolve
from unisono.spec.errors import ConfigProblems
from unisono.spec.training import RATES

KEYS = {"steps": 101, "warmup_steps": 10, "lr": 1.0}


@pytest.mark.parametrize(("name", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_up_to_the_peak_and_down_to_the_last(name: str, middle: float) -> None:
    floor = {} if name == "constant" else {"min_lr": 0.1}
    rate = TrainConfig(lr_schedule=name, **KEYS, **floor).rate()
    assert rate(0) == pytest.approx(0.1) and rate(9) == 1.0 and rate(10) == 1.0
    assert rate(55) == pytest.approx(middle)
    assert rate(100) == rate(500) == pytest.approx(floor.get("min_lr", 1.0))


def test_a_tenth_of_the_peak_is_the_last_where_none_is_given() -> None:
    assert TrainConfig(**KEYS).rate()(100) == pytest.approx(0.1)


def test_a_key_that_the_chosen_schedule_has_not_is_refused() -> None:
    with pytest.raises(ConfigProblems, match=r"train\.min_lr means nothing to adamw and constant"):
        resolve(Recipe(train=TrainConfig(lr_schedule="constant", min_lr=0.0)), "dp=1")


def test_all_are_found() -> None:
    assert RATES.names() == ("constant", "cosine", "linear", "range")
