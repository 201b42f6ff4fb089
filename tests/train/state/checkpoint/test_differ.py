"""Two checkpoints are the same if and only if every bit of every tensor is, however either was cut."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.train.state.checkpoint.cuts import save_all, worlds
from unisono.spec.errors import UsageError
from unisono_contrib.train.state.checkpoint import differ
from unisono_contrib.train.state.checkpoint.differ import compare, compare_runs

QUIET = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def saved(run: Path, step: int, **tensors: Tensor) -> Path:
    """A checkpoint of one rank; `blocks_0` is stored as `model/blocks.0`, `optim_x` as `optim/x`."""
    named = {
        f"optim/{name[6:]}" if name.startswith("optim_") else f"model/{name.replace('_', '.')}": tensor
        for name, tensor in tensors.items()
    }
    layout = [[(name, (0,) * x.dim(), tuple(x.shape)) for name, x in named.items()]]
    return save_all(run, step, named, layout, {}, keep=None)


@QUIET
@given(worlds(), st.data())
def test_the_same_tensors_cut_in_other_ways_are_the_same(tmp_path_factory, world, data):
    tensors, (ours, theirs) = world
    place = tmp_path_factory.mktemp("cuts")
    a, b = save_all(place / "a", 1, tensors, ours, {}), save_all(place / "b", 1, tensors, theirs, {})
    same = compare(a, b)
    assert (same.tensors, same.differing, same.first) == (len(tensors), 0, None)
    filled = sorted(name for name, x in tensors.items() if x.numel())
    if not filled:
        return
    name = data.draw(st.sampled_from(filled))
    at = data.draw(st.integers(0, tensors[name].numel() - 1))
    other = tensors[name].clone().reshape(-1)
    other.view(torch.uint8)[at * other.element_size()] ^= 1
    changed = {**tensors, name: other.reshape(tensors[name].shape)}
    found = compare(a, save_all(place / "c", 1, changed, theirs, {}))
    assert found.differing == 1 and found.first is not None
    assert (found.first.name, found.first.elements, found.first.size) == (name, 1, other.numel())


def test_the_first_in_the_order_of_blocks_and_by_how_much(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    a = saved(tmp_path / "a", 1, blocks_2=x, blocks_10=x, head=x)
    b = saved(
        tmp_path / "b", 1, blocks_2=x + torch.tensor([[0, 0.5, 0], [0, 0, -2.0]]), blocks_10=x + 9, head=x
    )
    state = compare(a, b)
    assert (state.tensors, state.differing) == (3, 2)
    first = state.first
    assert first is not None
    assert (first.name, first.elements, first.size, first.largest, first.why) == (
        "model/blocks.2",
        2,
        6,
        2.0,
        "",
    )


def test_a_zero_has_a_sign_and_what_is_no_number_no_distance(tmp_path: Path) -> None:
    zero, nan = torch.zeros(3), torch.tensor([0.0, float("nan"), 0.0])
    plain = saved(tmp_path / "a", 1, x=zero)
    signed, broken = (
        compare(plain, saved(tmp_path / "b", 1, x=-zero)),
        compare(plain, saved(tmp_path / "c", 1, x=nan)),
    )
    assert signed.first is not None and (signed.first.elements, signed.first.largest) == (3, 0.0)
    assert broken.first is not None and (broken.first.elements, broken.first.largest) == (1, None)
    assert compare(saved(tmp_path / "d", 1, x=nan), saved(tmp_path / "e", 1, x=nan)).first is None


@pytest.mark.parametrize(
    ("other", "why"), [({"y": torch.zeros(2)}, "absent"), ({"x": torch.zeros(3)}, "shape"),
                       ({"x": torch.zeros(2, dtype=torch.bfloat16)}, "dtype")]
)  # fmt: skip
def test_what_cannot_be_laid_on_each_other_says_why(
    tmp_path: Path, other: dict[str, Tensor], why: str
) -> None:
    state = compare(saved(tmp_path / "a", 1, x=torch.zeros(2)), saved(tmp_path / "b", 1, **other))
    assert state.first is not None and (state.first.name, state.first.why) == ("model/x", why)


def test_tensors_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (saved(tmp_path / run, 1, **{f"t{i}": torch.ones(8) * i for i in range(5)}) for run in "ab")
    read: list[list[str]] = []
    whole = differ.read_full
    monkeypatch.setattr(differ, "AT_ONCE", 64)
    monkeypatch.setattr(differ, "read_full", lambda folder, names: read.append(names) or whole(folder, names))
    assert compare(a, b).first is None
    assert [len(names) for names in read] == [2, 2, 2, 2, 1, 1]


def test_the_first_checkpoint_that_differs_is_named_weights_before_the_optimisers_state(
    tmp_path: Path,
) -> None:
    x = torch.ones(4)
    for run, late in (("a", x), ("b", x + 1)):
        saved(tmp_path / run, 2, w=x, optim_m=x)
        saved(tmp_path / run, 4, w=x, optim_m=late)
        saved(tmp_path / run, 6, w=late, optim_m=late)
    (tmp_path / "b" / "checkpoints" / "step-000002" / "rank-00000.safetensors").write_bytes(b"cut")
    found = compare_runs(tmp_path / "a", tmp_path / "b", lambda step: step)
    assert found["compared"] == [4] and "step-2 is damaged" in found["unread"][0]
    assert (found["first"]["step"], found["first"]["what"]) == (4, "optimiser state")
    assert found["first"]["tensor"]["name"] == "optim/m" and found["first"]["tensor"]["largest"] == 1.0
    doubled = compare_runs(tmp_path / "a", tmp_path / "b", lambda step: 3 * step)
    assert doubled["compared"] == [2] and doubled["first"]["what"] == "weights"
    assert compare_runs(tmp_path / "a", tmp_path / "b", lambda step: None) == {
        "compared": [], "first": None, "unread": [],
    }  # fmt: skip


def test_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / run, 1, x=torch.zeros(2)) for run in "ab")
    (b / "manifest.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        compare(a, b)
    assert caught.value.code == "K01"
