"""Positions dealt over cp: who holds which, which blocks of attention there are, and what is kept for backward."""

from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.members import Shape
from unisono.comm.mesh import Mesh
from unisono.models.gpt import GPTConfig
from unisono.models.gpt.net import Core
from unisono.models.noise import Dropout, Noise, numbers
from unisono.observe.span import Recorder
from unisono.parallel.attend import CONTEXT_WAYS, tiles
from unisono.plan import Plan
from unisono.spec.layout import Places
from unisono_contrib.comm import threads

CPU = torch.device("cpu")
WAYS = CONTEXT_WAYS.names()


@given(st.sampled_from(WAYS), st.integers(1, 5), st.integers(1, 4))
def test_blocks_are_the_causal_pairs_each_once(name: str, ranks: int, size: int):
    way, full = CONTEXT_WAYS.read(name), 2 * ranks * size
    held = [way.places(full, i, ranks) for i in range(ranks)]
    seen = torch.zeros(full, full, dtype=torch.int64)
    for mine in held:
        for theirs in held:
            for rows, keys, causal in tiles(mine, theirs):
                at, of = numbers(mine, CPU)[rows], numbers(theirs, CPU)[keys]
                block = torch.ones(len(at), len(of), dtype=torch.int64)
                seen[at[:, None], of] += block.tril() if causal else block
    assert torch.equal(seen, torch.ones(full, full, dtype=torch.int64).tril())


@given(st.integers(2, 6), st.integers(1, 4))
def test_balanced_ranks_have_as_much_to_attend_to(ranks: int, size: int):
    way = CONTEXT_WAYS.read("ring")
    held = [way.places(2 * ranks * size, i, ranks) for i in range(ranks)]
    work = {int((numbers(places, CPU) + 1).sum()) for places in held}
    assert len(work) == 1
    per_step = {
        sum((r.stop - r.start) * (k.stop - k.start) for r, k, _ in tiles(held[i], held[(i - step) % ranks]))
        for step in range(1, ranks)
        for i in range(ranks)
    }
    assert len(per_step) == 1


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(1, 5),
    st.data(),
)
def test_parts_of_places_are_parts_of_their_numbers(
    gaps: list[tuple[int, int]], ranks: int, data: st.DataObject
):
    stretches, end = [], 0
    for gap, size in gaps:
        stretches.append((end + gap, size))
        end += gap + size
    places = Places(end, tuple(stretches))
    start = data.draw(st.integers(0, places.size - 1))
    size = data.draw(st.integers(1, places.size - start))
    assert (
        numbers(places.part(start, size), CPU).tolist() == numbers(places, CPU).tolist()[start : start + size]
    )
    dealt = [numbers(p, CPU).tolist() for i in range(ranks) if (p := places.dealt(i, ranks)).size]
    assert [n for some in dealt for n in some] == numbers(places, CPU).tolist()


def kept(name: str, ranks: int, positions: int, dropout: float) -> list[int]:
    """Bytes that each rank's attention keeps for backward, each storage once."""
    config = GPTConfig(n_head=4, d_model=32, dropout=dropout)

    def live(rank: int) -> int:
        group = Mesh(Shape(cp=ranks), rank, Recorder(rank), timedelta(seconds=60)).cp
        core = CONTEXT_WAYS.read(name).bind(Core(Dropout(config.dropout)), group, positions)
        storages: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        given = [torch.randn(1, 4, positions // ranks, 8, requires_grad=True) for _ in range(3)]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = core(*given, Noise(0, torch.arange(1)))
        out.sum().backward()
        return sum(storages.values())

    return threads.run(ranks, live)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["ring", "gather"])
def test_what_is_kept_grows_with_the_context_and_falls_with_the_ranks(name: str, dropout: float):
    (one, *_), (twice, *_) = kept(name, 2, 64, dropout), kept(name, 2, 128, dropout)
    assert twice == 2 * one
    assert kept(name, 4, 128, dropout) == [one] * 4


@pytest.mark.parametrize(
    ("text", "model", "words"),
    [
        ("cp=3", {}, "cp=3 does not divide the context 64"),
        ("cp=64", {}, "split in 128 chunks"),
        ("cp=4 cp_kind=ulysses", {"n_head": 6, "d_model": 24}, "splits the heads 6"),
        ("cp=2 tp=2 cp_kind=ulysses", {"n_kv_head": 2}, "splits the key-value heads 2"),
        ("cp=2", {"kind": "mlp"}, "attends to no positions"),
    ],
)
def test_what_cannot_be_split_is_refused_with_a_remedy(text: str, model: dict, words: str):
    from unisono.config import ModelConfig, Recipe

    problems = Plan.parse(text).check(Recipe(model=ModelConfig(**model)))
    found = [p for p in problems if p.code == "P12" and words in p.what]
    assert found and all(p.fix for p in found), problems
    assert not Plan.parse("cp=2").check(Recipe())
