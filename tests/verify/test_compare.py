"""Gradients beside a reference: the figure that is told is above the bound exactly where something is wrong."""

from dataclasses import dataclass

import pytest
import torch

from unisono.config import TrainConfig
from unisono.verify.bounds import Bounds
from unisono.verify.compare import CompareTerms, judge


@dataclass
class Gradients:
    """A record of gradients alone."""

    tensors: dict[str, torch.Tensor]
    notes: tuple = ()

    @property
    def shapes(self):
        return {key: tuple(x.shape) for key, x in self.tensors.items()}

    @property
    def parts(self):
        return self.tensors

    def names(self, kind):
        return [key for key in self.tensors if key.startswith(f"{kind}/")]

    def whole(self, key):
        return self.tensors.get(key)

    def copies(self, key):
        return []


def judged(monkeypatch, lost, large, small):
    for part in ("data", "init", "losses", "norm", "clipped", "updated", "buffers"):
        monkeypatch.setattr(f"unisono.verify.compare._Step.{part}", lambda self: iter(()))
    bounds = Bounds(loss=0.0, grad=1e-12 + lost, unit=2.0**-53, spread=7.0, lost=lost)
    terms = CompareTerms(TrainConfig(), bounds, exact=False, owners={})
    right = {"raw/large": torch.DoubleTensor([100.0, 1.0]), "raw/small": torch.DoubleTensor([1.0, 0.0])}
    seen = {"raw/large": torch.DoubleTensor([large, 1.0]), "raw/small": torch.DoubleTensor([small, 0.0])}
    out = judge(terms, 0, Gradients(right), None, Gradients(seen))  # type: ignore[arg-type]
    return out.errors["grad"], bounds.grad, [one.name for one in out.divergences]


@pytest.mark.parametrize(
    ("lost", "large", "small", "wrong"),
    [
        (1.0, 100.0, -1.2, []),  # 2.2 of its own largest entry, held to the model's
        (1.0, -50.0, 1.0, ["raw/large"]),
        (1.0, 100.0, -105.0, ["raw/small"]),
        (0.0, 100.0, 1.0 + 2.0**-45, []),
        (0.0, 100.0, 1.1, ["raw/small"]),
    ],
)
def test_a_figure_is_above_the_bound_where_something_is_wrong(lost, large, small, wrong, monkeypatch) -> None:
    figure, bound, found = judged(monkeypatch, lost, large, small)
    assert found == wrong
    assert figure > bound if wrong else 0 < figure <= bound
