"""A folder that the installed transformers has written begins a run, for every family of docs/foreign-models.md; one step
and the way back lead to what the library has after the same step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.hf.families import CONFIGS, plain, theirs, written
from tests.models.hf.test_folder import steps
from unisono.config import Recipe, resolve
from unisono.train.build.build import feeds
from unisono.train.data.load import load
from unisono.train.export import run as export

transformers = pytest.importorskip("transformers")
TEXT = "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. "
BATCH, LR = 4, 1e-3
OFF = {"gemma2": 1e-6, "gemma3_text": 1e-6}
"""Norms of these pass through float32."""
TRAIN = {
    "steps": 2, "global_batch": BATCH, "micro_batch": 1, "warmup_steps": 0, "dtype": "float64", "lr": LR, "min_lr": LR,
    "weight_decay": 0.0, "clip": 0.0, "betas": (0.9, 0.95), "eps": 1e-8,
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", CONFIGS)
def test_one_step_from_a_saved_folder_and_back(family: str, tmp_path: Path, threads: Any) -> None:
    model = theirs(written(family, tmp_path / "config"))
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "text.txt").write_text(TEXT * 8)
    source = "digits" if family == "vit" else f"text:{tmp_path / 'text.txt'}"
    recipe = Recipe(
        model={"kind": f"hf:{tmp_path / 'theirs'}"},  # type: ignore[arg-type]
        data={"source": source},  # type: ignore[arg-type]
        train=TRAIN,  # type: ignore[arg-type]
    )
    threads(steps, 1, text=recipe.model_dump_json(), plan="dp=1", count=1, folder=str(tmp_path / "run"))
    export(tmp_path / "run", out=tmp_path / "out")
    eager = {"experts_implementation": "eager"} if family == "mixtral" else {}
    again, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True, **eager)
    assert not any(report.values()), report

    alone = resolve(recipe, "dp=1 precision=fp64", 1)
    leaves = feeds(alone.recipe, alone.plan, load(recipe.data, recipe.model), torch.device("cpu"))[0]
    step = leaves.fetch(0, range(BATCH))
    batch = tuple(torch.cat([getattr(leaf, part) for leaf in step]) for part in ("inputs", "targets"))
    ((loss, _, weights),) = plain(model, [batch], LR)
    found = dict(again.named_parameters())
    assert loss > 0 and set(found) == set(weights)
    for name, x in weights.items():
        torch.testing.assert_close(found[name], x, rtol=0.0, atol=OFF.get(family, 1e-9), msg=name)
