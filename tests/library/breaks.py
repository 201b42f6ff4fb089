"""Loaders of every kind, walked by a loop that leaves a pass early, saves and goes on in another life. Runs in ranks."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

import unisono

COUNT, BATCH, PASSES = 22, 4, 3  # six batches, the last one of two samples


class Numbers(Dataset):
    """Samples that are their own numbers."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(i)


class Rows(IterableDataset):
    """A stream of numbers, or of whole batches; workers share it out."""

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        rows = list(range(first, COUNT, step))
        if not self.whole:
            return iter(map(torch.tensor, rows))
        return (torch.tensor(rows[low : low + BATCH]) for low in range(0, len(rows), BATCH))


class Shuffled:
    """A loader of the user's own, in another order in each pass."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(COUNT).split(BATCH))


class Uneven(BatchSampler):
    """Batches of unequal sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for low, high in ((0, 1), (1, 6), (6, 9), (9, 16), (16, 20), (20, COUNT)):
            yield order[low:high]

    def __len__(self) -> int:
        return 6


def own() -> torch.Generator:
    return torch.Generator().manual_seed(5)


KINDS: dict[str, Any] = {
    "in order": lambda **w: DataLoader(Numbers(), batch_size=BATCH, **w),
    "shuffled": lambda **w: DataLoader(Numbers(), batch_size=BATCH, shuffle=True, **w),
    "own generator": lambda **w: DataLoader(Numbers(), batch_size=BATCH, shuffle=True, generator=own(), **w),
    "own sampler": lambda **w: DataLoader(
        Numbers(), BATCH, sampler=RandomSampler(Numbers(), generator=own()), **w
    ),
    "drop_last": lambda **w: DataLoader(Numbers(), batch_size=BATCH, shuffle=True, drop_last=True, **w),
    "batch_sampler": lambda **w: DataLoader(
        Numbers(), batch_sampler=Uneven(RandomSampler(Numbers()), BATCH, False), **w
    ),
    "stream": lambda **w: DataLoader(Rows(), batch_size=BATCH, **w),
    "stream of batches": lambda **w: DataLoader(Rows(whole=True), batch_size=None, **w),
    "list": lambda: torch.arange(COUNT).split(BATCH),
    "own loader": Shuffled,
}
WORKERS = {
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "prefetch": {"num_workers": 1, "prefetch_factor": 4},
}


def life(
    ctx: Any,
    kind: str,
    plan: str,
    folder: str,
    breaks: int,
    how: str,
    workers: str = "",
    again: bool = False,
    leaves: int = 0,
) -> list[list[int]]:
    """The samples of each global batch. Pass `leaves` is left after `breaks` batches. how: "after" saves behind that
    loop and ends, "inside" saves before the break, "end" saves after the next pass, "" saves nothing and makes all
    passes. again: goes on from the checkpoint."""
    torch.manual_seed(0)
    job = unisono.init(plan, context=ctx)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, KINDS[kind](**WORKERS.get(workers, {})))
    state = (job.load(folder) or {}) if again else {}
    seen: list[list[int]] = []
    for number in range(state.get("pass", 0), PASSES):
        for at, batch in enumerate(_walked(data, how), 1):
            model(batch[:, None].double()).mean().backward()
            optimizer.step()
            own = [] if job._batch.current.borrowed else batch.tolist()
            seen.append([i for part in job.ranks.gather(own) for i in part])
            if number == leaves and at == breaks:
                if how == "inside":
                    job.save(folder, {"pass": number})
                    return seen
                break
        if (number - leaves, how) in ((0, "after"), (1, "end"), (0, "named")):
            job.save(folder, {"pass": number + 1})
            return seen
    return seen


def _walked(data: Iterable[Any], how: str) -> Iterator[Any]:
    """As the loop walks it: by `for` itself, or through an iterator of its own."""
    return (batch for batch in data) if how == "named" else iter(data)
