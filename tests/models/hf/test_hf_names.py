"""Names of a foreign model's weights: boxes of theirs and of ours, both ways."""

import torch

from unisono.models.hf.names import NamedPart, Names, one_of, to_ours, to_theirs


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
    ours = to_ours(names, theirs.__getitem__)
    assert {name: tuple(x.shape) for name, x in ours.items()} == names.shapes
    assert torch.equal(ours["q"], theirs["c_attn"][:, :4].T)
    for files in (False, True):
        back = to_theirs(names, ours, files=files)
        again = to_ours(names, back.__getitem__, files=files)
        assert all(torch.equal(again[name], x) for name, x in ours.items())
        assert {name: tuple(x.shape) for name, x in back.items()} == names.their_shapes(files)
    module = to_theirs(names, ours, files=False, aliases=True)
    assert torch.equal(module["lm_head"], theirs["wte"])
    assert all(torch.equal(module[name], x) for name, x in theirs.items())


def test_a_box_says_what_to_read() -> None:
    names, theirs = _names(), _state()
    ours = to_ours(names, theirs.__getitem__)
    files = to_theirs(names, ours)
    for name, start, size in (("q", (1, 1), (2, 2)), ("up", (1, 2, 0), (1, 3, 2)), ("out", (3, 0), (2, 3))):
        whole = ours[names.ties.get(name, name)]
        box = torch.zeros_like(whole)
        for part in names.of_box(name, start, size):
            there = part.of_theirs(files[part.name])
            where = tuple(slice(a, a + n) for a, n in zip(part.start, part.size, strict=True))
            box[where] = there
        cut = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        assert torch.equal(box[cut], whole[cut]) and box.count_nonzero() == whole[cut].numel()
    assert [part.name for part in names.of_box("up", (1, 2, 0), (1, 3, 2))] == ["1.up"]


def test_their_names_lead_to_ours() -> None:
    names = _names()
    assert set(names.ours_of("c_attn")) == {"q", "k"}
    assert set(names.ours_of("gate_up", files=False)) == {"gate", "up"}
    assert set(names.ours_of("lm_head")) == {"table"}
    assert not names.ours_of("nothing")


def test_one_tensor_is_a_view() -> None:
    names, theirs = _names(), _state()
    assert one_of(names, "out", theirs.__getitem__).data_ptr() == theirs["wte"].data_ptr()
