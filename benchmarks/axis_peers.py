"""Stages and tensor parallelism as one writes them by hand with PyTorch's own parts, ready to be raced."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import Racer, Task, adamw, batches, model_of, ours
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as by_torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unisono.config import resolve
from unisono.launch.context import NullChannel
from unisono.parallel.cut import cut


class Piece(nn.Module):
    """Some consecutive blocks, with the stem if first and the head if last."""

    def __init__(self, model: nn.Module, blocks: range, first: bool, last: bool) -> None:
        super().__init__()
        self.stem = model.stem if first else nn.Identity()
        self.blocks = nn.Sequential(*(model.blocks[i] for i in blocks))  # type: ignore[index]
        self.head = model.head if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def whole_batch(task: Task) -> Task:
    """The task of a rank that sees all samples, as stages and ranks of tp do."""
    return replace(task, place=replace(task.place, rank=0, world=1))


def clipped(parameters: Sequence[nn.Parameter], limit: float, shared: Callable[[nn.Parameter], bool]) -> None:
    """Clip by the norm of the whole model. shared: whether all ranks hold the same of a parameter."""
    grads = [(p, p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad) for p in parameters]
    held = [(p, g) for p, g in grads if g is not None]
    squares = torch.stack(torch._foreach_norm([g for _, g in held])).square()
    own = torch.tensor([not shared(p) or dist.get_rank() == 0 for p, _ in held])
    norm = dist_sum(squares[own].sum()).sqrt()
    if norm > limit:
        torch._foreach_mul_([g for _, g in held], limit / (norm + 1e-6))


def dist_sum(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def pipelining(task: Task, name: str, kind: type, each: int) -> Racer:
    """torch.distributed.pipelining, with the same cut as ours. each: stages of a rank."""
    model, place, train = model_of(task), task.place, task.recipe.train
    count = place.world * each
    cuts = cut(model, count)
    mine = [i * place.world + place.rank for i in range(each)]
    pieces = {i: Piece(model, cuts[i], i == 0, i == count - 1) for i in mine}
    stages = [PipelineStage(pieces[i], i, count, place.device) for i in mine]
    schedule = kind(stages if each > 1 else stages[0], task.micros, loss_fn=mean_loss)
    whole = nn.ModuleList(pieces.values())
    optimizer, rate, get, made = adamw(whole, train), train.rate(), batches(whole_batch(task)), 0
    parameters = list(whole.parameters())
    first, last = 0 in pieces, count - 1 in pieces

    def step() -> float:
        nonlocal made
        for group in optimizer.param_groups:
            group["lr"] = rate(made)
        inputs, targets = get(made)
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if last else {}
        schedule.step(*((inputs,) if first else ()), **given)
        if train.clip:
            clipped(parameters, train.clip, lambda p: False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        made += 1
        return torch.stack(losses).mean().item() if losses else 0.0

    return Racer(name, step)


def tensor(task: Task) -> Racer:
    """DTensor's parallelize_module: columns, then rows; the vocabulary's scores gathered for the loss."""
    model, place, train = model_of(task), task.place, task.recipe.train
    mesh = init_device_mesh(place.device.type, (place.world,))
    how = {"attn.qkv": ColwiseParallel(), "attn.proj": RowwiseParallel(), "mlp.up": ColwiseParallel(),
           "mlp.down": RowwiseParallel()}  # fmt: skip
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, how)
    parallelize_module(model.head, mesh, {"out": ColwiseParallel(output_layouts=Replicate())})  # type: ignore[arg-type]
    cut_ones = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain_ones = nn.ParameterList([p for p in model.parameters() if not isinstance(p, DTensor)])
    optimizers = [adamw(nn.ParameterList(cut_ones), train), adamw(plain_ones, train)]
    rate, get, made = train.rate(), batches(whole_batch(task)), 0
    parameters = list(model.parameters())

    def step() -> float:
        nonlocal made
        for group in (group for one in optimizers for group in one.param_groups):
            group["lr"] = rate(made)
        inputs, targets = get(made)
        size, total = len(inputs) // task.micros, 0.0
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            loss = mean_loss(model(x), y) / task.micros
            loss.backward()
            total += loss.item()
        if train.clip:
            clipped(
                parameters, train.clip, lambda p: not isinstance(p, DTensor) or p.placements[0].is_replicate()
            )
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=True)
        made += 1
        return total

    return Racer("DTensor", step)


def even_cut(task: Task) -> Racer:
    """Ours, with as many blocks in each stage, whatever they cost."""
    blocks = len(model_of(task).blocks)  # type: ignore[arg-type]
    plan = resolve(
        task.recipe, f"pp={task.place.world} schedule=pipedream:cut={'/'.join(2 * [str(blocks // 2)])}"
    )
    return ours(task, plan.plan, "even cut", NullChannel(), Path(tempfile.mkdtemp()))


PEERS: Mapping[str, Callable[[Task], Racer]] = {
    "torch-gpipe": partial(pipelining, name="torch GPipe", kind=by_torch.ScheduleGPipe, each=1),
    "torch-1f1b": partial(pipelining, name="torch 1F1B", kind=by_torch.Schedule1F1B, each=1),
    "torch-interleaved": partial(
        pipelining, name="torch Interleaved", kind=by_torch.ScheduleInterleaved1F1B, each=2
    ),
    "torch-zb": partial(pipelining, name="torch IntZB", kind=by_torch.ScheduleInterleavedZeroBubble, each=2),
    "dtensor": tensor,
    "even-cut": even_cut,
}
