"""Loops as users write them, and what is expected of each on several ranks.

A loop is a function of a job that yields its losses; without the job's lines it is plain PyTorch. Played on one process
and on several it must be one of three: *equal* to one process on the joint batch, *refused* with a code and a remedy,
or *told* with a code before the first update. None may be different in silence.

    python -m tests.library.catalogue [--plans dp=2,shard=2] [--only LOOP]     plays them and prints a table

Most files hold loops whose outcome is known to the letter. `hard_loops` are those of two reviews and of their kinds:
"silent" there were different without a word once. Each is now equal, told or refused; or `unisono.prove` convicts it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.library import Job
from unisono.spec.errors import UsageError

Function = Callable[[Job], Iterator[float]]
PLANS = {"dp=2": 2, "dp=3": 3, "shard=2": 2, "dp=2 shard=2": 4}


@dataclass(frozen=True)
class Loop:
    """verdict, shard, four: what is expected under `dp`, under `shard` and on four ranks, if that is another. near: how
    far numbers may be from those of one process, relative to the largest."""

    function: Function
    verdict: str
    shard: str
    four: str
    near: float

    def __call__(self, job: Job) -> None:
        """The loop as `unisono.prove` plays it."""
        for _ in self.function(job):
            pass

    @property
    def name(self) -> str:
        return self.function.__name__

    def expected(self, plan: str) -> str:
        if PLANS[plan] == 4:
            return self.four
        return self.shard if "shard" in plan else self.verdict


def loop(
    verdict: str = "equal", *, shard: str = "", four: str = "", near: float = 1e-10
) -> Callable[[Function], Loop]:
    """Marks a function as a loop of the catalogue."""
    return lambda function: Loop(function, verdict, shard or verdict, four or shard or verdict, near)


def all_loops(models_of_hugging_face: bool = False) -> list[Loop]:
    """Those of the files of this folder; those of transformers' models take seconds to import."""
    from tests.library.catalogue import generative, hugging, losses, order, updates, vision, watched

    files = (
        vision,
        generative,
        losses,
        updates,
        order,
        watched,
        *([hugging] if models_of_hugging_face else []),
    )
    return [one for file in files for one in vars(file).values() if isinstance(one, Loop)]


def hard_loops() -> list[Loop]:
    """Expected is a class alone: equal, told, refused, raised (by torch), silent, or open, where nothing is known."""
    from tests.library.catalogue import (
        batch_statistics,
        control,
        draws,
        functional,
        hooks,
        meeting,
        modules,
        optimising,
    )

    files = (functional, hooks, draws, batch_statistics, meeting, control, modules, optimising)
    return [one for file in files for one in vars(file).values() if isinstance(one, Loop)]


def samples(count: int = 21, width: int = 6, classes: int = 3) -> TensorDataset:
    """21 in batches of 8: no last batch that two ranks, or three, divide."""
    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(count, width, generator=drawn)
    return TensorDataset(x, torch.randint(classes, (count,), generator=drawn))


def batches(data: Any = None, size: int = 8, **options: Any) -> Any:
    return DataLoader(data if data is not None else samples(), batch_size=size, **options)


def play(job: Job, one: Loop) -> dict[str, Any]:
    """What a loop comes to under this job; `refused` has the code, and the updates made until then."""
    torch.manual_seed(3)
    np.random.seed(3)
    try:
        losses = list(one.function(job))
    except UsageError as error:
        return {"refused": error.code if error.fix else "without a remedy", "after": job.step}
    finally:
        job._steps._losses.switch(False)
    weights = {}
    for made in job._prepared:
        for name, value in job.weights(made.model).items():
            weights[f"{made.number}.{name}"] = value.double().flatten().tolist()
    codes = [note[2:5] for note in job.notes if note.startswith("U-")]
    noted = [one.says for page in job._ledger.latest().values() for one in page.values()]
    return {"losses": losses, "weights": weights, "told": codes, "noted": noted}


def on_ranks(ctx: Any, plan: str, loops: Sequence[Loop], strict: bool = False) -> dict[str, Any]:
    """Each loop with a job of its own."""
    torch.set_default_dtype(torch.float64)
    return {one.name: play(unisono.init(plan, context=ctx, strict=strict), one) for one in loops}


def verdict(one: Loop, alone: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> str:
    """equal, told CODE, refused CODE, or what no loop may be: DIFFERENT by how much, PARTED ranks, taken for A HANG."""
    first = ranks[0]
    if any("refused" in rank for rank in ranks):
        codes = {rank.get("refused") for rank in ranks}
        late = [rank["after"] for rank in ranks if rank.get("after")]
        return (
            f"refused {first.get('refused')}"
            if len(codes) == 1 and not late
            else f"REFUSED {codes} late {late}"
        )
    for calls in zip(*(rank["noted"] for rank in ranks), strict=True):
        if len({*calls, ""}) > 2:
            return f"A HANG: {calls}"  # the watchdog would end it
    if first["told"]:
        return "told " + " ".join(first["told"])
    if any(
        rank["losses"] != first["losses"] or rank["weights"].keys() != first["weights"].keys()
        for rank in ranks
    ):
        return "PARTED"
    off = max(distance(alone, rank) for rank in ranks)
    return "equal" if off <= one.near else f"DIFFERENT by {off:.1e}"


def distance(alone: dict[str, Any], rank: dict[str, Any]) -> float:
    """The largest difference of a loss or of a weight, relative to the largest of its kind."""
    pairs = [(alone["losses"], rank["losses"])]
    pairs += [(alone["weights"][name], values) for name, values in rank["weights"].items()]
    return max(relative(a, b) for a, b in pairs)


def relative(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        return float("inf")
    off = max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)
    return off / max(1e-3, max(map(abs, a), default=0.0)) if off == off else float("inf")
