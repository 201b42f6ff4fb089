"""Which checkpoint a run goes on from, and that it does not on other data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.config import Recipe
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, load, save
from unisono.train.state.resume import choose, identity

RECIPE = Recipe(seed=3)


def saved(run: Path, step: int, **state: Any) -> Path:
    weight = torch.full((4,), float(step))
    return save(
        run,
        step,
        [Box("model/w", (4,), (0,), weight)],
        {"step": step, "recipe": json.loads(RECIPE.model_dump_json()), **state},
    )


def test_the_newest_whole_one_is_chosen_and_what_is_wrong_with_newer_ones_said(tmp_path: Path) -> None:
    older, newer = (saved(tmp_path, step, data={"fingerprint": "ab"}) for step in (1, 2))
    assert choose(tmp_path, RECIPE, "ab") == (newer, [])
    (newer / "manifest.json").write_text("{}")
    folder, notes = choose(tmp_path, RECIPE, "ab")
    assert folder == older and len(notes) == 1
    assert "step-000002 is damaged" in notes[0] and notes[0].endswith("going on from step-000001")
    (older / "manifest.json").unlink()
    with pytest.raises(UsageError) as caught:
        choose(tmp_path, RECIPE, "ab")
    assert caught.value.code == "K06" and "step-000001 is damaged" in caught.value.likely


def test_other_data_under_the_same_name_is_refused(tmp_path: Path) -> None:
    """The file has changed, or Python was updated: the string in the recipe is the same."""
    saved(tmp_path, 1, data={"fingerprint": "ab"})
    with pytest.raises(UsageError, match="other data: its fingerprint was ab, stdlib has cd now") as caught:
        choose(tmp_path, RECIPE, "cd")
    assert caught.value.code == "K05" and caught.value.exit == 2 and "Python" in caught.value.likely


def test_another_recipe_is_refused_where_it_decides_what_is_computed(tmp_path: Path) -> None:
    saved(tmp_path, 1, data={"fingerprint": "ab"})
    with pytest.raises(UsageError, match="begun with seed = 3, not 4"):
        choose(tmp_path, RECIPE.model_copy(update={"seed": 4}), "ab")
    longer = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"steps": 7})})
    assert choose(tmp_path, longer, "ab")[1] == []


def test_a_checkpoint_from_before_fingerprints_is_gone_on_from(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1, data={"next_position": 32})
    assert choose(tmp_path, RECIPE, "cd") == (folder, [])
    assert load(folder, [])["data"] == {"next_position": 32}


def test_two_saves_of_one_step_are_not_the_same_checkpoint(tmp_path: Path) -> None:
    first, second = (saved(tmp_path / name, 1) for name in ("a", "b"))
    assert identity(first) != identity(second) and identity(first).startswith("step-000001 ")
    (second / "manifest.json").unlink()
    with pytest.raises(UsageError) as caught:
        identity(second)
    assert caught.value.code == "K01"


def test_bits_that_a_policy_promises_are_not_gone_on_with_on_other_threads(tmp_path: Path) -> None:
    """Sums on a CPU depend on the number of threads: canonical refuses, other policies say so."""
    folder = saved(tmp_path, 1, data={"fingerprint": "ab"}, last_bits={"device": "AVX2", "threads": 1})
    canonical = RECIPE.model_copy(update={"plan": "dp=2 sync=canonical"})
    assert choose(tmp_path, canonical, "ab", {"device": "AVX2", "threads": 1}) == (folder, [])
    with pytest.raises(UsageError, match="threads 1 a rank and goes on with threads 4") as caught:
        choose(tmp_path, canonical, "ab", {"device": "AVX2", "threads": 4})
    assert caught.value.code == "K05" and "--launch.threads_per_rank 1" in str(caught.value.fix)
    with pytest.raises(UsageError, match="device AVX2"):
        choose(tmp_path, canonical, "ab", {"device": "AVX512", "threads": 1})
    (note,) = choose(tmp_path, RECIPE, "ab", {"device": "AVX2", "threads": 2})[1]
    assert "last bits may differ" in note
