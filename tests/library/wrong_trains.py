"""Wrong `train` functions for a fuzz of stacks: each is a way in which people train with DDP and FSDP2, with one mistake.

A function is a bug on both stacks; names that begin with `ddp_` or `fsdp2_` are bugs of one. Each takes the step and the
place, as `TrainingStep.train` does.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Parts = Callable[[int], float]


def named(stack: str) -> list[str]:
    """The names of a stack's bugs."""
    alone = {"ddp_", "fsdp2_"} - {f"{stack}_"}
    return [name for name in BUGS if not name.startswith(tuple(alone))]


def bug(train: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    BUGS.append(train.__name__)
    return train


BUGS: list[str] = []

# What is right ---------------------------------------------------------------------------------------------------------


def backward(
    step: Any,
    place: Any,
    parts: Parts | None = None,
    turns: Iterable[int] | None = None,
    meets: Callable[[int], bool] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Accumulate. parts: factors of losses. turns: which micro-batches. meets: with which ones ranks meet. after: is
    called after each backward."""
    factor: Parts = parts or place.part
    turns = list(range(place.micros) if turns is None else turns)
    for turn in turns:
        with meeting(place.model, turn == turns[-1] if meets is None else meets(turn)):
            (step.loss(place.model, place.batches[turn]) * factor(turn)).backward()
        if after is not None:
            after()


def meeting(model: Any, meets: bool) -> Any:
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if meets else model.no_sync()
    model.set_requires_gradient_sync(meets)
    return nullcontext()


def finish(place: Any, clip: float | None = None) -> None:
    limit = place.clip if clip is None else clip
    if limit:
        nn.utils.clip_grad_norm_(place.model.parameters(), limit)
    place.optimizer.step()
    place.optimizer.zero_grad()


def gradients(place: Any) -> list[Any]:
    return [p.grad for p in place.model.parameters() if p.grad is not None]


def right(step: Any, place: Any) -> None:
    backward(step, place)
    finish(place)


# Means -----------------------------------------------------------------------------------------------------------------


@bug
def mean_over_the_targets_of_a_rank(step: Any, place: Any) -> None:
    backward(step, place, lambda turn: place.weights[turn] / max(1.0, sum(place.weights)))
    finish(place)


@bug
def mean_of_means(step: Any, place: Any) -> None:
    backward(step, place, lambda turn: 1 / place.micros)
    finish(place)


@bug
def mean_over_turns(step: Any, place: Any) -> None:
    """Each turn is normalised by its own targets on all ranks, and turns are averaged."""
    first = place.step * place.groups * place.micros
    counts = [step.weight(step.batch(first + i)) for i in range(place.groups * place.micros)]
    turns = [max(1.0, sum(counts[turn :: place.micros])) for turn in range(place.micros)]
    backward(step, place, lambda turn: place.weights[turn] * place.groups / turns[turn] / place.micros)
    finish(place)


@bug
def padding_is_counted(step: Any, place: Any) -> None:
    many = place.micros * place.groups * place.batches[0]["labels"].numel()
    backward(step, place, lambda turn: place.weights[turn] * place.groups / many)
    finish(place)


@bug
def not_divided_by_micro_batches(step: Any, place: Any) -> None:
    backward(step, place, lambda turn: place.part(turn) * place.micros)
    finish(place)


@bug
def divided_by_ranks_twice(step: Any, place: Any) -> None:
    backward(step, place, lambda turn: place.part(turn) / place.world)
    finish(place)


@bug
def summed_over_ranks(step: Any, place: Any) -> None:
    backward(step, place, lambda turn: place.part(turn) * place.world)
    finish(place)


# Micro-batches ---------------------------------------------------------------------------------------------------------


@bug
def first_micro_batch_lost(step: Any, place: Any) -> None:
    backward(step, place, turns=range(min(1, place.micros - 1), place.micros))
    finish(place)


@bug
def last_micro_batch_lost(step: Any, place: Any) -> None:
    backward(step, place, turns=range(max(1, place.micros - 1)))
    finish(place)


@bug
def short_micro_batches_skipped(step: Any, place: Any) -> None:
    """Those with fewer than half of the targets, but for the last one, with which ranks meet."""
    backward(
        step,
        place,
        lambda turn: place.part(turn) * (1.0 if turn == place.micros - 1 or is_long(place, turn) else 0.0),
    )
    finish(place)


def is_long(place: Any, turn: int) -> bool:
    return place.weights[turn] >= place.batches[turn]["labels"].numel() / 2


@bug
def first_micro_batch_twice(step: Any, place: Any) -> None:
    backward(step, place, turns=[0, *range(place.micros)])
    finish(place)


@bug
def last_micro_batch_weighs_double(step: Any, place: Any) -> None:
    backward(step, place, lambda turn: place.part(turn) * (2 if turn == place.micros - 1 else 1))
    finish(place)


@bug
def every_rank_reads_the_same(step: Any, place: Any) -> None:
    first = place.step * place.groups * place.micros
    place.batches = [step.batch(first + turn) for turn in range(place.micros)]
    weights = [step.weight(batch) for batch in place.batches]
    backward(step, place, lambda turn: weights[turn] / max(1.0, sum(weights)))
    finish(place)


@bug
def same_data_each_step(step: Any, place: Any) -> None:
    """An iterator that begins anew."""
    first = place.rank * place.micros
    place.batches = [step.batch(first + turn) for turn in range(place.micros)]
    right(step, place)


@bug
def cleared_between_micro_batches(step: Any, place: Any) -> None:
    for turn in range(place.micros):
        place.optimizer.zero_grad()
        backward(step, place, turns=[turn])
    finish(place)


@bug
def never_cleared(step: Any, place: Any) -> None:
    backward(step, place)
    if place.clip:
        nn.utils.clip_grad_norm_(place.model.parameters(), place.clip)
    place.optimizer.step()


# Steps -----------------------------------------------------------------------------------------------------------------


@bug
def step_each_micro_batch(step: Any, place: Any) -> None:
    for turn in range(place.micros):
        backward(step, place, turns=[turn])
        finish(place)


@bug
def step_twice(step: Any, place: Any) -> None:
    backward(step, place)
    if place.clip:
        nn.utils.clip_grad_norm_(place.model.parameters(), place.clip)
    place.optimizer.step()
    finish(place, 0.0)


@bug
def state_lost(step: Any, place: Any) -> None:
    place.optimizer.state.clear()
    right(step, place)


@bug
def decay_lost(step: Any, place: Any) -> None:
    for group in place.optimizer.param_groups:
        group["weight_decay"] = 0.0
    right(step, place)


@bug
def all_decays(step: Any, place: Any) -> None:
    """Vectors too, which have a group of their own."""
    most = max(group.get("weight_decay", 0.0) for group in place.optimizer.param_groups)
    for group in place.optimizer.param_groups:
        group["weight_decay"] = most
    right(step, place)


@bug
def rate_by_ranks(step: Any, place: Any) -> None:
    for group in place.optimizer.param_groups:
        group["lr"] = group.setdefault("base", group["lr"]) * place.world
    right(step, place)


@bug
def rate_falls_each_step(step: Any, place: Any) -> None:
    right(step, place)
    for group in place.optimizer.param_groups:
        group["lr"] *= 0.9


@bug
def rank_skips(step: Any, place: Any) -> None:
    """The first rank leaves out each second update."""
    if place.rank or place.step % 2 == 0:
        return right(step, place)
    backward(step, place)
    if place.clip:
        nn.utils.clip_grad_norm_(place.model.parameters(), place.clip)
    return place.optimizer.zero_grad()


@bug
def late_gradients(step: Any, place: Any) -> None:
    """Updates by the gradient of the step before."""
    backward(step, place)
    kept = [None if p.grad is None else p.grad.clone() for p in place.model.parameters()]
    past = KEPT.get(place.step - 1, [None if g is None else torch.zeros_like(g) for g in kept])
    KEPT[place.step] = kept
    for p, grad in zip(place.model.parameters(), past, strict=True):
        p.grad = grad
    finish(place)


KEPT: dict[int, list[Any]] = {}


@bug
def unused_parameters_are_zeros(step: Any, place: Any) -> None:
    """So that they decay, and move on by their momentum."""
    backward(step, place)
    for p in place.model.parameters():
        if p.grad is None and p.requires_grad:
            p.grad = torch.zeros_like(p)
    finish(place)


# Clipping --------------------------------------------------------------------------------------------------------------


@bug
def never_clipped(step: Any, place: Any) -> None:
    backward(step, place)
    finish(place, 0.0)


@bug
def clipped_each_micro_batch(step: Any, place: Any) -> None:
    def clip() -> None:
        if place.clip:
            nn.utils.clip_grad_norm_(place.model.parameters(), place.clip)

    backward(step, place, meets=lambda turn: True, after=clip)
    finish(place)


@bug
def clipped_before_the_mean(step: Any, place: Any) -> None:
    """The sum is clipped, and divided afterwards."""
    backward(step, place, lambda turn: place.part(turn) * place.micros)
    if place.clip:
        nn.utils.clip_grad_norm_(place.model.parameters(), place.clip)
    for grad in gradients(place):
        grad.div_(place.micros)
    finish(place, 0.0)


@bug
def clipped_by_value(step: Any, place: Any) -> None:
    backward(step, place)
    for grad in gradients(place) if place.clip else ():
        grad.clamp_(-place.clip, place.clip)
    finish(place, 0.0)


@bug
def tied_weights_twice_in_the_norm(step: Any, place: Any) -> None:
    backward(step, place)
    if place.clip:
        params = [p for _, p in place.model.named_parameters(remove_duplicate=False) if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in params])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        for grad in gradients(place):
            grad.mul_(min(1.0, place.clip / (float(norm) + 1e-6)))
    finish(place, 0.0)


# Precision -------------------------------------------------------------------------------------------------------------


@bug
def gradients_pass_float32(step: Any, place: Any) -> None:
    backward(step, place)
    rounded(gradients(place), torch.float32)
    finish(place)


@bug
def gradients_pass_bfloat16(step: Any, place: Any) -> None:
    backward(step, place, meets=lambda turn: True, after=lambda: rounded(gradients(place), torch.bfloat16))
    finish(place)


def rounded(grads: Sequence[Any], dtype: torch.dtype) -> None:
    for grad in grads:
        grad.copy_(grad.to(dtype).to(grad.dtype))


# Where ranks meet ------------------------------------------------------------------------------------------------------


@bug
def ddp_never_meets(step: Any, place: Any) -> None:
    backward(step, place, meets=lambda turn: False)
    finish(place)


@bug
def ddp_meets_at_first(step: Any, place: Any) -> None:
    """`no_sync` on the last micro-batch, and not on the first."""
    backward(step, place, meets=lambda turn: turn == 0 and place.micros > 1)
    finish(place)


@bug
def ddp_passed_by(step: Any, place: Any) -> None:
    """Forward through `.module`, so that the hooks of DDP are never armed."""
    for turn, batch in enumerate(place.batches):
        (step.loss(place.model.module, batch) * place.part(turn)).backward()
    finish(place)


@bug
def ddp_rank_zero_wins(step: Any, place: Any) -> None:
    """Ranks do not meet; the first one's weights are broadcast."""
    backward(step, place, meets=lambda turn: False)
    finish(place)
    for p in place.model.parameters():
        dist.broadcast(p.data, 0)


@bug
def ddp_weights_are_averaged(step: Any, place: Any) -> None:
    """In the place of gradients, which is right for plain SGD alone."""
    backward(step, place, meets=lambda turn: False)
    finish(place)
    for p in place.model.parameters():
        dist.all_reduce(p.data)
        p.data.div_(place.world)


@bug
def ddp_clipped_before_ranks_meet(step: Any, place: Any) -> None:
    backward(step, place, meets=lambda turn: False)
    if place.clip:
        nn.utils.clip_grad_norm_(place.model.parameters(), place.clip)
    mean_over_ranks(place.model.parameters(), place.world)
    finish(place, 0.0)


@bug
def ddp_vectors_do_not_meet(step: Any, place: Any) -> None:
    backward(step, place, meets=lambda turn: False)
    mean_over_ranks([p for p in place.model.parameters() if p.dim() > 1], place.world)
    finish(place)


@bug
def ddp_only_the_last_micro_batch_meets(step: Any, place: Any) -> None:
    """What was accumulated before it stays at home."""
    backward(step, place, meets=lambda turn: False, turns=range(place.micros - 1))
    kept = [p.grad for p in place.model.parameters()]
    place.optimizer.zero_grad()
    backward(step, place, turns=[place.micros - 1])
    for p, grad in zip(place.model.parameters(), kept, strict=True):
        if grad is not None and p.grad is not None:
            p.grad.add_(grad)
    finish(place)


def mean_over_ranks(params: Iterable[Any], world: int) -> None:
    for p in params:
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad.div_(world)


@bug
def fsdp2_norm_of_a_shard(step: Any, place: Any) -> None:
    """Each rank clips by the norm of its own shards."""
    backward(step, place)
    if place.clip:
        local = [grad.to_local() for grad in gradients(place)]
        norm = nn.utils.get_total_norm(local)
        for grad in local:
            grad.mul_(min(1.0, place.clip / (float(norm) + 1e-6)))
    finish(place, 0.0)


@bug
def fsdp2_clipped_layer_by_layer(step: Any, place: Any) -> None:
    backward(step, place)
    for p in place.model.parameters() if place.clip else ():
        nn.utils.clip_grad_norm_([p], place.clip)
    finish(place, 0.0)


@bug
def fsdp2_not_divided_by_ranks(step: Any, place: Any) -> None:
    for part in place.model.modules():
        if hasattr(part, "set_gradient_divide_factor"):
            part.set_gradient_divide_factor(1.0)
    right(step, place)


@bug
def fsdp2_last_micro_batch_is_not_reduced(step: Any, place: Any) -> None:
    backward(step, place, meets=lambda turn: turn != place.micros - 1 or place.micros == 1)
    finish(place)
