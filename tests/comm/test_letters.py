"""Letters are read whole or not at all, and their mean has the bits of a sum over dp."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.spec.errors import UsageError
from unisono_contrib.comm.depot import Depot, depot_at
from unisono_contrib.comm.mailbox.letters import Letter, create, mean, post, read, sealed, unsealed
from unisono_contrib.comm.threads import run


@pytest.fixture(params=["folder", "memory"])
def depot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Depot]:
    yield depot_at(str(tmp_path) if request.param == "folder" else f"memory://{uuid4().hex}", "mailbox")


def letter(peer: str = "a", seed: int = 0, weight: float = 1.0, round: int = 3) -> Letter:
    lot = torch.Generator().manual_seed(seed)
    tensors = {"w": torch.randn(7, 5, generator=lot), "b": torch.randn(5, generator=lot).bfloat16()}
    return Letter(peer, round, weight, tensors, {"step": seed, "host": "Zürich"})


def same(a: Letter | None, b: Letter) -> bool:
    assert a is not None
    heads = (a.peer, a.round, a.weight, a.meta) == (b.peer, b.round, b.weight, b.meta)
    return heads and all(torch.equal(a.tensors[name], x) for name, x in b.tensors.items())


def test_a_letter_comes_back_as_it_was_posted(depot: Depot) -> None:
    assert read(depot, "box", "a") is None
    assert post(depot, "box", letter())
    assert same(read(depot, "box", "a"), letter())
    flat = torch.arange(12.0)  # views of one buffer, one of them not contiguous
    views = Letter("b", 1, 2.5, {"x": flat[:6].view(2, 3).t(), "y": flat[4:]})
    assert post(depot, "box", views) and same(read(depot, "box", "b"), views)


def test_the_first_letter_of_a_peer_stays(depot: Depot) -> None:
    assert post(depot, "box", letter(seed=1)) and not post(depot, "box", letter(seed=2))
    assert same(read(depot, "box", "a"), letter(seed=1))


@pytest.mark.parametrize("name", ["a.json", "body"])
@pytest.mark.parametrize(
    "damage", ["empty", "half", "one byte less", "one byte more", "a flipped bit", "absent"]
)
def test_no_torn_write_is_ever_read(tmp_path: Path, name: str, damage: str) -> None:
    depot = depot_at(str(tmp_path), "mailbox")
    post(depot, "box", letter())
    path = tmp_path / "box/a.json" if name == "a.json" else next((tmp_path / "box").glob("*.safetensors"))
    content = path.read_bytes()
    flipped = bytes([*content[:40], content[40] ^ 4, *content[41:]])
    broken = {
        "empty": b"", "half": content[: len(content) // 2], "one byte less": content[:-1],
        "one byte more": content + b"\n", "a flipped bit": flipped,
    }  # fmt: skip
    path.unlink() if damage == "absent" else path.write_bytes(broken[damage])
    # What is behind a body's length is not the letter's; a folder's writes never make it.
    assert read(depot, "box", "a") is None
    path.write_bytes(content)
    assert same(read(depot, "box", "a"), letter())


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_letter_that_is_being_written_is_not_there_yet(data: st.DataObject) -> None:
    """Objects appear one after the other, each of them up to any byte: what a store without whole writes may show."""
    whole, seen = (
        depot_at(f"memory://{uuid4().hex}", "mailbox"),
        depot_at(f"memory://{uuid4().hex}", "mailbox"),
    )
    post(whole, "box", letter(weight=0.5))
    objects = [(f"box/{name}", whole.read(f"box/{name}", 1 << 20)) for name in whole.names("box")]
    order = data.draw(st.permutations(objects))
    for place, (path, content) in enumerate(order):
        cut = data.draw(st.integers(0, len(content) - 1))
        seen.write(path, content[:cut])
        assert read(seen, "box", "a") is None
        seen.write(path, content)
        if place == 0:
            assert read(seen, "box", "a") is None
    assert same(read(seen, "box", "a"), letter(weight=0.5))


def test_a_seal_of_another_or_of_nonsense_is_no_letter(depot: Depot) -> None:
    post(depot, "box", letter())
    head = unsealed(depot, "box/a.json")
    assert head is not None
    for said in (
        {**head, "peer": "b"},
        {"peer": "c"},
        {**head, "peer": "c", "bytes": "x"},
        {**head, "peer": "c"},
    ):
        depot.write("box/c.json", sealed(said))
        assert read(depot, "box", "c") is None
    depot.write("box/c.json", json.dumps(head).encode())
    assert read(depot, "box", "c") is None and read(depot, "box", "../box/a") is None


def test_of_several_who_create_one_succeeds_unless_what_is_there_is_broken(depot: Depot) -> None:
    assert create(depot, "box/x", {"n": 1}) and not create(depot, "box/x", {"n": 2})
    assert unsealed(depot, "box/x") == {"n": 1}
    depot.write("box/x", sealed({"n": 1})[:-3])
    assert create(depot, "box/x", {"n": 3}) and unsealed(depot, "box/x") == {"n": 3}


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_counts_nothing_is_refused(depot: Depot, weight: float) -> None:
    with pytest.raises(UsageError, match="no number of samples"):
        post(depot, "box", letter(weight=weight))
    with pytest.raises(UsageError, match=r"tensor n of peer a is torch.int64"):
        post(depot, "box", Letter("a", 0, 1.0, {"n": torch.arange(3)}))


@pytest.mark.parametrize("peers", [1, 2, 3, 5])
def test_the_mean_has_the_bits_of_a_sum_over_dp(peers: int) -> None:
    letters = [letter(f"p{i}", seed=i, weight=100.0 + 7 * i) for i in range(peers)]
    total = sum(x.weight for x in letters)

    def reduced(rank: int) -> dict[str, torch.Tensor]:
        group = Mesh(Shape(dp=peers), rank, Recorder(rank), timedelta(seconds=60)).dp
        own = letters[rank]
        return {n: group.all_reduce(x.clone().mul_(own.weight / total)) for n, x in own.tensors.items()}

    merged = mean(letters)
    for mine in run(peers, reduced):
        assert all(torch.equal(mine[name], x) for name, x in merged.items())


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6).filter(any))
@settings(max_examples=25, deadline=None)
def test_each_counts_for_its_weight(weights: list[int]) -> None:
    letters = [
        Letter(f"p{i}", 0, w, {"x": torch.full((3,), float(i)).double()}) for i, w in enumerate(weights)
    ]
    want = sum(i * w for i, w in enumerate(weights)) / sum(weights)
    assert mean(letters)["x"].tolist() == pytest.approx([want] * 3, rel=1e-12)


def test_what_has_no_mean_is_refused_by_name() -> None:
    first = letter("a")
    with pytest.raises(UsageError, match="of peers a and b only one has posted tensor b"):
        mean([first, Letter("b", 3, 1.0, {"w": first.tensors["w"]})])
    other = Letter("b", 3, 1.0, {**first.tensors, "w": torch.zeros(7, 4)})
    with pytest.raises(UsageError, match=r"w is \[7, 5\] torch.float32 of peer a, and \[7, 4\]") as caught:
        mean([first, other])
    assert caught.value.code == "L05" and caught.value.exit == 2
    with pytest.raises(UsageError, match="counts for anything"):
        mean([Letter("a", 0, 0.0, first.tensors)])
