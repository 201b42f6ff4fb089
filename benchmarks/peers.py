"""Training loops as one writes them by hand with PyTorch alone, and ours, ready to be raced in one process.

Every loop trains the same model class from the same weights on the same samples in the same order, with AdamW
(fused), clipping and the learning-rate schedule of the recipe. The hand-written ones do no more than that: no
metrics, no check for bad numbers, no global loss. Ours is the generator behind `unisono train` with its observers.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from unisono.config import Recipe, TrainConfig
from unisono.launch.context import Channel
from unisono.models.build import build as build_model
from unisono.models.init import initialise
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.spec.sink import SINKS, RunFacts
from unisono.train.build.build import Place, build, facts_of, feeds
from unisono.train.data.dataset import Corpus, TokenWindows
from unisono.train.data.order import sample_ids
from unisono.train.step.train_step import train
from unisono.train.watch.journal import Journal, LiveTable

TABLE_STEPS = 256  # steps whose samples are looked up together

Hold = Callable[[bool], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Task:
    """What is raced: a resolved recipe, its micro-batches per step, this rank's place, and the data."""

    recipe: Recipe
    micros: int
    place: Place
    corpus: Corpus
    bf16: bool = False

    @property
    def compiled(self) -> bool:
        """Whether torch.compile is used, in ours and by hand."""
        return self.recipe.train.compile

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.recipe.train.global_batch * self.recipe.model.context


@dataclass(frozen=True, slots=True)
class Racer:
    """One loop. `step()` makes one optimiser step and returns its loss: ours the global one, by hand the rank's,
    on a GPU without waiting for it."""

    name: str
    step: Callable[[], float | Tensor]
    close: Callable[[], None] = lambda: None


def model_of(task: Task) -> nn.Module:
    """The recipe's model with its initial weights, on the rank's device."""
    model = build_model(task.recipe.model, facts_of(task.corpus), device="cpu")
    initialise(model, task.recipe.seed)
    return model.to(task.place.device)


def batches(task: Task) -> Callable[[int], tuple[Tensor, Tensor]]:
    """step → inputs, targets [this rank's samples, context], gathered from the tokens in memory."""
    windows = task.corpus.train
    if not isinstance(windows, TokenWindows):
        raise TypeError("races are run on text")
    count, context = len(windows), windows.context
    inputs = windows.tokens[: count * context].reshape(count, context)
    targets = windows.tokens[1 : count * context + 1].reshape(count, context)
    batch = task.recipe.train.global_batch
    share = batch // task.place.world
    own = slice(task.place.rank * share, (task.place.rank + 1) * share)
    known: dict[int, np.ndarray] = {}

    def rows(step: int) -> np.ndarray:
        table, row = divmod(step, TABLE_STEPS)
        if table not in known:
            known.clear()
            ids = sample_ids(task.recipe.seed, table * TABLE_STEPS * batch, TABLE_STEPS * batch, count)
            known[table] = ids.reshape(TABLE_STEPS, batch)[:, own]
        return known[table][row]

    def get(step: int) -> tuple[Tensor, Tensor]:
        ids = rows(step)
        pair = [torch.from_numpy(x[ids].astype(np.int64)) for x in (inputs, targets)]
        if task.place.device.type == "cuda":
            pair = [x.pin_memory().to(task.place.device, non_blocking=True) for x in pair]
        return pair[0], pair[1]

    return get


def decayed(model: nn.Module, train: TrainConfig) -> list[dict[str, Any]]:
    """Groups of parameters as GPT-2's reproductions have them: matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, train: TrainConfig) -> Optimizer:
    """AdamW of the whole model."""
    return AdamW(decayed(model, train), lr=train.lr, betas=train.betas, eps=train.eps, fused=True)


def dealt_adamw(model: nn.Module, train: TrainConfig) -> Optimizer:
    """AdamW whose state torch's ZeRO-1 deals to the ranks, a parameter whole to one of them."""
    settings = {"lr": train.lr, "betas": train.betas, "eps": train.eps, "fused": True}
    return ZeroRedundancyOptimizer(decayed(model, train), optimizer_class=AdamW, **settings)


def by_hand(
    task: Task,
    model: nn.Module,
    whole: nn.Module,
    hold: Hold,
    updates: Callable[[nn.Module, TrainConfig], Optimizer] = adamw,
) -> Callable[[], float | Tensor]:
    """The loop around a model. whole: what holds the parameters. hold(last): around one forward and backward."""
    train, get = task.recipe.train, batches(task)
    optimizer, parameters, rate = updates(whole, train), list(whole.parameters()), train.rate()
    device, made = task.place.device.type, 0

    def step() -> float | Tensor:
        nonlocal made
        for group in optimizer.param_groups:
            group["lr"] = rate(made)
        inputs, targets = get(made)
        size = len(inputs) // task.micros
        losses = []
        for m, (x, y) in enumerate(zip(inputs.split(size), targets.split(size), strict=True)):
            with hold(m == task.micros - 1):
                with torch.autocast(device, torch.bfloat16) if task.bf16 else nullcontext():
                    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / task.micros
                loss.backward()
            losses.append(loss.detach())
        if train.clip:
            clip_grad_norm_(parameters, train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        made += 1
        total = sum(losses[1:], start=losses[0])
        return total if device == "cuda" else total.item()

    return step


def plain(task: Task) -> Racer:
    """One process, one device."""
    whole = model_of(task)
    model = torch.compile(whole) if task.compiled else whole
    return Racer("plain loop", by_hand(task, model, whole, lambda last: nullcontext()))  # type: ignore[arg-type]


def ddp(task: Task, dealt: bool = False) -> Racer:
    """DistributedDataParallel, with gradients as views of its buckets. dealt: with torch's ZeRO-1 behind it."""
    ids = [task.place.device] if task.place.device.type == "cuda" else None
    inner = torch.compile(model_of(task)) if task.compiled else model_of(task)
    model = DistributedDataParallel(inner, device_ids=ids, gradient_as_bucket_view=True)  # type: ignore[arg-type]
    hold: Hold = lambda last: nullcontext() if last else model.no_sync()
    updates = dealt_adamw if dealt else adamw
    return Racer("DDP, ZeRO-1" if dealt else "DDP", by_hand(task, model, model, hold, updates))


def fsdp(task: Task, reshard: bool) -> Racer:
    """FSDP2 on every block and on the whole; reshard: parameters are let go after forward (ZeRO-3). Gradients are
    scattered in every backward, as in ours, so that both hold as little."""
    model = model_of(task)
    for block in model.blocks:  # type: ignore[union-attr]
        if task.compiled:
            block.compile()
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    name = "FSDP2" if reshard else "FSDP2 no reshard"
    return Racer(name, by_hand(task, model, model, lambda last: nullcontext()))


def ours(task: Task, plan: Plan, label: str, line: Channel, folder: Path) -> Racer:
    """`unisono train` between its first and its last step: loop, step, policy, and after each step the observers
    that write metrics and events and tell the live table. No trace (a run draws three steps), no checkpoint."""
    recipe, place = task.recipe, task.place
    recorder = Recorder(place.rank)
    run = build(recipe, plan, place, task.corpus, recorder)
    feed, val = feeds(recipe, plan, task.corpus, place.device)
    steps = train(run, feed, recipe.train.steps, line.stop_requested)
    facts = RunFacts(
        folder, place.rank, place.world, "here", place.backend, run.mesh.at, 0, recipe.train.steps, recorder
    )
    sinks = [SINKS.read(name) for name in ("metrics", "events")]
    observers = [
        LiveTable(line, recipe.train.steps, run.mesh.at["pp"]),
        *(sink.open(facts) for sink in sinks if sink.every_rank or place.rank == 0),
    ]
    journal = Journal(observers, task.tokens)

    def step() -> float:
        begun = time.perf_counter()
        report = next(steps)
        journal.add(report, recorder.lap(), time.perf_counter() - begun)
        return report.loss

    def close() -> None:
        journal.close()
        feed.close()
        val.close()

    return Racer(f"ours {label}", step, close)
