"""Names of a foreign model's weights: boxes of theirs and of ours, both ways."""

import torch

from tests.models.hf.families import HeldWeights, to_ours, to_theirs
from unisono.models.hf.names import NamedPart, Names
from unisono.models.weights import read_box


def _names() -> Names:
    """Queries and keys fused and turned; two experts that files hold one by one; a table and its alias."""
    q = NamedPart("c_attn", (0, 0), (4, 3), (0, 0), turned=True)
    k = NamedPart("c_attn", (0, 0), (2, 3), (0, 4), turned=True)
    up = (NamedPart("gate_up", (0, 0, 0), (2, 5, 3), (0, 5, 0)),)
    gate = (NamedPart("gate_up", (0, 0, 0), (2, 5, 3), (0, 0, 0)),)
    each = {
        name: tuple(NamedPart(f"{e}.{name}", (e, 0, 0), (1, 5, 3), (0, 0)) for e in range(2))
        for name in ("gate", "up")
    }
    table = (NamedPart("wte", (0, 0), (7, 3), (0, 0)),)
    shapes = {"q": (4, 3), "k": (2, 3), "gate": (2, 5, 3), "up": (2, 5, 3), "table": (7, 3)}
    modules = {"q": (q,), "k": (k,), "gate": gate, "up": up, "table": table}
    return Names(shapes, modules, {**modules, **each}, {"out": "table"}, {"lm_head": "wte"})


def _state() -> dict[str, torch.Tensor]:
    return {"c_attn": torch.randn(3, 6), "gate_up": torch.randn(2, 10, 3), "wte": torch.randn(7, 3)}


def test_there_and_back() -> None:
    names, theirs = _names(), _state()
    ours = to_ours(names, theirs)
    assert {name: tuple(x.shape) for name, x in ours.items()} == names.shapes
    assert torch.equal(ours["q"], theirs["c_attn"][:, :4].T)
    for files in (False, True):
        back = to_theirs(names, ours, files)
        again = to_ours(names, back, files)
        assert all(torch.equal(again[name], x) for name, x in ours.items())
    module = to_theirs(names, ours)
    assert all(torch.equal(module[name], x) for name, x in theirs.items())


def test_a_box_reads_no_more_than_its_part() -> None:
    names, theirs = _names(), _state()
    ours = to_ours(names, theirs)
    files = HeldWeights(to_theirs(names, ours, files=True))
    for name, start, size in (("q", (1, 1), (2, 2)), ("up", (1, 2, 0), (1, 3, 2)), ("table", (3, 0), (2, 3))):
        box = torch.empty(size)
        read_box(names.files[name], files, start, box)
        cut = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        assert torch.equal(box, ours[name][cut])
