"""What is remembered of operations on shapes is what torch says of them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.train.build.known_shapes import KnownShapes


class Both(TorchDispatchMode):
    """Asks twice, the second time of memory, and torch as well."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.worked_out = KnownShapes(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.known.call(func, args, kwargs)
        again, right = self.known.call(func, args, kwargs), func(*args, **kwargs)
        for a, b in zip(flat(again), flat(right), strict=True):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device), func
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes(), func
        return right


def flat(out):
    return [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor)]


def x(*shape, **given):
    return torch.empty(*shape, device="meta", **given)


OPS = {
    "product": lambda: x(3, 4) @ x(4, 5),
    "of a transposed one": lambda: x(4, 3).t() @ x(4, 5),
    "sum over a dim": lambda: x(3, 4, 5).sum((0, 2), keepdim=True),
    "two outputs": lambda: x(3, 4).max(dim=1),
    "whole numbers": lambda: x(3, 4).argmax(1).to(torch.int32),
    "list of tensors": lambda: torch.cat([x(3, 4), x(2, 4)]),
    "lists that are given back": lambda: torch._foreach_add([x(3), x(4)], 1.0),
    "expanded": lambda: x(1, 4).expand(3, 4) + x(3, 1),
    "a copy that keeps strides": lambda: x(4, 3).t().clone(),
    "views": lambda: x(4, 6).view(2, 2, 6)[:, 1].chunk(2, -1),
    "in place": lambda: x(3).add_(1).mul_(x(3)),
    "attention": lambda: torch.nn.functional.scaled_dot_product_attention(x(1, 2, 4, 8), x(1, 2, 4, 8), x(1, 2, 4, 8)),
    "loss": lambda: torch.nn.functional.cross_entropy(x(4, 7), x(4, dtype=torch.int64)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_memory_answers_as_torch_does(name: str) -> None:
    with Both():
        OPS[name]()


def test_backward_too() -> None:
    with Both():
        layer = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.LayerNorm(6)).to("meta")
        layer(x(3, 4)).sum().backward()


def test_tensors_that_have_numbers_are_computed() -> None:
    known, add = KnownShapes(), torch.ops.aten.add.Tensor
    a = torch.tensor([1.0, 2.0])
    assert [known.call(add, (a, b), {}).tolist() for b in (a, a + 1)] == [[2.0, 4.0], [3.0, 5.0]]


def test_what_came_before_is_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known, mm = KnownShapes(), torch.ops.aten.mm.default
    first = known.call(mm, (x(3, 4), x(4, 5)), {})

    class Never:
        _schema = mm._schema

        def __call__(self, *args):
            raise AssertionError("worked out again")

        def __hash__(self):
            return hash(mm)

        def __eq__(self, other):
            return other is mm or other is self

    again = known.call(Never(), (x(3, 4), x(4, 5)), {})
    assert again.shape == first.shape and again is not first
    with pytest.raises(AssertionError, match="worked out"):
        known.call(Never(), (x(3, 4), x(4, 6)), {})
