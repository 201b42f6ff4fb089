"""`export --to weights`: the state_dict that the author of a plain module loads into it, strictly, for equal logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.models import foreign
from unisono.config import ModelConfig, Recipe
from unisono.models.build import Facts, build
from unisono.models.cut_chain import InferredChain
from unisono.spec.errors import UsageError
from unisono.train.export import run
from unisono.train.state.checkpoint import Box, save

FILE = Path(foreign.__file__)


def trained(folder: Path, kind: str, said: bool = True) -> nn.Module:
    """A run's folder with one checkpoint of a model of which every number matters. said: it tells how it was cut."""
    (folder / "words.txt").write_text("a few words, and a few more\n" * 40)
    fields = {"kind": kind, "context": 12}
    model = build(ModelConfig.model_validate(fields), Facts(vocab=256), seed=0)
    held = {n: v for block in model.blocks for n, v in getattr(block, "held", {}).items()}  # type: ignore[union-attr]
    generator, pieces = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
            pieces.append(Box(f"model/{name}", tuple(p.shape), (0,) * p.dim(), p.detach()))
    assert isinstance(model, InferredChain) or not held
    recipe = Recipe.model_validate_json(
        json.dumps({"model": fields, "data": {"source": f"text:{folder}/words.txt", "tokenizer": "byte"}})
    )
    state: dict[str, Any] = {"step": 3, "recipe": recipe.model_dump(mode="json"), "plan": "tp=2"}
    if said:
        state["cut_names"] = {n: list(own) for n, own in getattr(model, "cut_names", {}).items()}
    save(folder, 3, pieces, state)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "said"), [("hand", True), pytest.param("mixer", False, marks=pytest.mark.slow)]
)
def test_a_plain_module_gets_its_own_names_back(name: str, said: bool, tmp_path: Path) -> None:
    tuned = trained(tmp_path, f"{FILE}:{name}", said)
    assert any(own.folded for own in tuned.cut_names.values())  # type: ignore[union-attr,operator]
    made = run(tmp_path, to="weights")
    theirs = getattr(foreign, name)(256, 12)
    state = load_file(Path(made["out"]) / "model.safetensors")
    theirs.load_state_dict(state, strict=True)
    tokens = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(theirs.eval()(tokens), tuned(tokens))
    again = run(tmp_path, to="weights", dtype="bfloat16", out=tmp_path / "narrow")
    assert again["tensors"] == len(state) == made["tensors"]


KEPT = """
import torch
from torch import nn

class Kept(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, 8), nn.Linear(8, vocab)
        self.again, self.spare = self.head, nn.Parameter(torch.zeros(2))
        self.register_buffer("mask", torch.ones(12, dtype=torch.bool))

    def forward(self, left, right):
        y = self.head(self.table(left) * self.mask[:, None] + self.table(right))
        BRANCH
        return y

    def unpack(self, x):
        return x, x.flip(1)

def kept(vocab):
    return Kept(vocab)
"""


@pytest.mark.parametrize(
    "branch", ["pass", pytest.param("y = y if y.sum() > 0 else -y", marks=pytest.mark.slow)]
)
def test_what_no_step_changes_is_as_the_constructor_makes_it(branch: str, tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text(KEPT.replace("BRANCH", branch))
    tuned = trained(tmp_path, f"{tmp_path}/kept.py:kept")
    made = run(tmp_path, to="weights")
    nets: dict[str, Any] = {}
    exec((tmp_path / "kept.py").read_text(), nets)
    theirs = nets["kept"](256)
    theirs.load_state_dict(load_file(Path(made["out"]) / "model.safetensors"), strict=True)
    tokens = torch.randint(256, (3, 12), generator=torch.Generator().manual_seed(1))
    if branch == "pass":
        for block in tuned.blocks:  # type: ignore[union-attr]
            block.refill()  # type: ignore[operator]
    assert torch.equal(theirs(*theirs.unpack(tokens)), tuned(tokens))
    (tmp_path / "kept.py").write_text(KEPT.replace("BRANCH", branch).replace("8", "9"))
    with pytest.raises(UsageError, match="not the one that was trained") as caught:
        run(tmp_path, to="weights")
    assert caught.value.code == "F01"
