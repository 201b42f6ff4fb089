"""A run that is broken off and goes on is the run that was not: the same samples, each once, and the same weights."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import unisono
from tests.ranks import World

pytestmark = pytest.mark.timeout(120)
COUNT, BATCH = 21, 4  # the last batch has one sample


class Named(Dataset):
    """Samples that know their number, and to which noise is added as they are fetched."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        return i, torch.full((3,), float(i)) / COUNT + 0.1 * torch.randn(3)


class Epochs(Sampler[int]):
    """A sampler of the user's own, told the epoch."""

    epoch = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.tolist())


class Counting(Epochs):
    """A sampler that counts its passes itself, which a new process does not know."""

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return super().__iter__()


def data_of(kind: str) -> Any:
    if kind == "stream":
        return [tuple(map(torch.stack, zip(*rows, strict=True))) for rows in streamed()]
    samplers = {"own sampler": Epochs, "counting sampler": Counting}
    order: dict[str, Any] = {"sampler": samplers[kind]()} if kind in samplers else {"shuffle": True}
    return DataLoader(Named(), batch_size=BATCH, num_workers=kind == "workers", **order)


def streamed() -> Iterator[list[Any]]:
    for low in range(0, COUNT, BATCH):
        yield [
            (torch.tensor(i), torch.full((3,), float(i)) / COUNT) for i in range(low, min(low + BATCH, COUNT))
        ]


def life(
    ctx: Any, folder: str, plan: str, kind: str, ahead: bool = False, stop: int | None = None, epochs: int = 2
) -> dict[str, Any]:
    """Train until step `stop`, where it saves and ends; from the last checkpoint, if there is one."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    job = unisono.init(plan, context=ctx)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, data = job.prepare(model, optimizer, data_of(kind))
    state = job.load(folder) or {"epoch": 0}
    seen: list[list[int]] = []
    for epoch in range(state["epoch"], epochs):
        if kind == "own sampler":
            data.sampler.epoch = epoch
        walk = iter(data)
        batch = next(walk, None)
        while batch is not None:
            after = next(walk, None) if ahead else None
            i, x = batch
            loss = F.cross_entropy(model(x), i % 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            borrowed = job._batch.current.borrowed
            seen.append([] if borrowed else i.tolist())
            if job.step == stop:
                job.save(folder, {"epoch": epoch})
                return {"seen": seen}
            batch = after if ahead else next(walk, None)
    return {"seen": seen, "weights": [p.flatten().tolist() for p in job.weights().values()]}


def lived(run: World, ranks: int, **kwargs: Any) -> tuple[list[list[int]], Any]:
    """The samples of each step, over all ranks, and the weights."""
    parts = run(life, ranks, group=False, plan=f"dp={ranks}", **kwargs)
    steps = zip(*(part["seen"] for part in parts), strict=True)
    return [sorted(chain(*step)) for step in steps], parts[0].get("weights")


CASES = {
    "shuffled": {},
    "own sampler": {},
    "stream": {},
    "look ahead": {"kind": "shuffled", "ahead": True},
    "at the uneven end": {"kind": "shuffled", "stops": (6,)},
    "at a batch before it": {"kind": "shuffled", "stops": (5, 11)},
    "other ranks": {"kind": "shuffled", "ranks": (2, 1, 3)},
    "from one": {"kind": "shuffled", "ranks": (1, 2, 2)},
}


def resumed(run: World, tmp_path: Path, kind: str, stops: Any, ranks: Any, ahead: bool) -> None:
    whole, weights = lived(run, ranks[0], folder=str(tmp_path / "whole"), kind=kind, ahead=ahead)
    assert sorted(chain(*whole[:6])) == sorted(chain(*whole[6:])) == list(range(COUNT))
    seen: list[list[int]] = []
    for stop, size in zip((*stops, None), ranks, strict=False):
        part, last = lived(run, size, folder=str(tmp_path / "broken"), kind=kind, ahead=ahead, stop=stop)
        seen += part
    assert seen == whole
    for a, b in zip(last, weights, strict=True):
        assert a == pytest.approx(b, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_each_sample_comes_once(threads: World, tmp_path: Path, name: str) -> None:
    """In the middle of a pass, and a second time in the next one."""
    case: Any = {"kind": name, "stops": (2, 9), "ranks": (2, 2, 2), "ahead": False} | CASES[name]
    resumed(threads, tmp_path, **case)


def test_each_sample_comes_once_with_workers(world: World, tmp_path: Path) -> None:
    resumed(world, tmp_path, kind="workers", stops=(2,), ranks=(2, 2), ahead=False)


def test_an_order_that_cannot_be_made_again_is_refused(threads: World, tmp_path: Path) -> None:
    lived(threads, 2, folder=str(tmp_path), kind="counting sampler", stop=9)
    with pytest.raises(unisono.UnisonoError) as raised:
        lived(threads, 2, folder=str(tmp_path), kind="counting sampler")
    assert raised.value.code == "J17" and raised.value.fix


def skipped(ctx: Any) -> list[Any]:
    torch.manual_seed(0)
    job = unisono.init("dp=-1", context=ctx)
    data = job.deal(DataLoader(TensorDataset(torch.arange(COUNT)), batch_size=BATCH, shuffle=True))
    data.skip(2)
    return [[job.gather(i).tolist() for (i,) in data] for _ in range(2)]


def test_batches_are_skipped_without_a_checkpoint_of_ours(threads: World) -> None:
    (one,), two = threads(skipped, 1, group=False), threads(skipped, 2, group=False)
    assert two == [one, one] and [len(part) for part in one] == [4, 6]


OWN = (5, 3, 4)  # samples of each rank's own, in batches of 2


def joined(
    ctx: Any, folder: str, plan: str, inside: bool, ahead: bool = False, stop: int | None = None
) -> dict[str, Any]:
    """As `life`, on data of each rank's own; inside: a loader for each pass, made in the loop."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    job = unisono.init(plan, context=ctx)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.prepare(model, optimizer)
    first = sum(OWN[: job.rank])
    named = torch.arange(first, first + OWN[job.rank])
    rows = TensorDataset(named, named[:, None].expand(-1, 3) / COUNT)
    own = DataLoader(rows, batch_size=2, shuffle=True)
    data = None if inside else job.join(own)
    state = job.load(folder) or {"epoch": 0}
    seen: list[list[int]] = []
    for epoch in range(state["epoch"], 2):
        walk = iter(job.join(own) if data is None else data)
        batch = next(walk, None)
        while batch is not None:
            after = next(walk, None) if ahead else None
            i, x = batch
            x = x if ahead else x + job.generator.randn(len(x), 3)
            loss = F.cross_entropy(model(x), i % 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append([] if job._batch.current.borrowed else i.tolist())
            if job.step == stop:
                job.save(folder, {"epoch": epoch})
                return {"seen": seen}
            batch = after if ahead else next(walk, None)
    return {"seen": seen, "weights": [p.flatten().tolist() for p in job.weights().values()]}


@pytest.mark.parametrize(
    ("stops", "inside", "ahead"),
    [
        ((2, 5), False, True),
        ((3,), True, False),
        *(
            pytest.param((stop,), inside, False, marks=pytest.mark.slow)
            for stop in (2, 3, 4)
            for inside in (0, 1)
        ),
    ],
    ids=str,
)
def test_data_of_each_ranks_own_goes_on_at_its_sample(
    threads: World, tmp_path: Path, stops: tuple[int, ...], inside: bool, ahead: bool
) -> None:
    """One rank has three batches, another two. inside: a loader is made for each pass. ahead: fetched one early."""

    def lives(folder: str, stop: int | None = None) -> list[dict[str, Any]]:
        kwargs = {"plan": "dp=3", "inside": inside, "ahead": ahead, "stop": stop}
        return threads(joined, 3, group=False, folder=str(tmp_path / folder), **kwargs)

    whole = lives("whole")
    assert [len(one["seen"]) for one in whole] == [6] * 3 and whole[1]["seen"][2] == []
    parts = [lives("broken", stop=stop) for stop in (*stops, None)]
    for rank in range(3):
        assert [batch for part in parts for batch in part[rank]["seen"]] == whole[rank]["seen"]
    for a, b in zip(parts[-1][0]["weights"], whole[0]["weights"], strict=True):
        assert a == pytest.approx(b, abs=1e-12)


def test_data_of_each_ranks_own_needs_its_ranks_within_a_pass(threads: World, tmp_path: Path) -> None:
    threads(joined, 3, group=False, plan="dp=3", inside=True, folder=str(tmp_path), stop=2)
    with pytest.raises(unisono.UnisonoError, match="within a pass of 3 ranks") as raised:
        threads(joined, 2, group=False, plan="dp=2", inside=True, folder=str(tmp_path))
    assert raised.value.code == "J17" and raised.value.fix


def passes(ctx: Any, folder: str, count: int) -> list[list[int]]:
    """Passes through data of this rank's own, whose loader shuffles by a generator of its own; saved after each."""
    job = unisono.init("dp=2", context=ctx)
    model = nn.Linear(1, 1)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own = TensorDataset(torch.arange(8))
    data = job.join(DataLoader(own, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1)))
    job.load(folder)
    orders = []
    for _ in range(count):
        orders.append([int(i) for (batch,) in data for i in batch])
        job.save(folder)
    return orders


def test_data_of_each_ranks_own_goes_on_with_its_next_pass(threads: World, tmp_path: Path) -> None:
    whole = threads(passes, 2, group=False, folder=str(tmp_path / "whole"), count=2)
    parts = [threads(passes, 2, group=False, folder=str(tmp_path / "broken"), count=1) for _ in range(2)]
    for rank in range(2):
        assert [parts[0][rank][0], parts[1][rank][0]] == whole[rank]
        assert whole[rank][0] != whole[rank][1]
