"""Hooks on gradients, functions of one's own, and what is done to gradients before the update."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.catalogue import batches, loop
from tests.library.catalogue.plain import each, grads, mlp, ready, sgd, step, trained
from unisono.library import Job


@loop()
def sign_of_gradient(job: Job) -> Iterator[float]:
    yield from trained(job, before=lambda model: [g.sign_() for g in grads(model)], optimizer=sgd)


@loop()
def gradient_centralised(job: Job) -> Iterator[float]:
    def centred(model: nn.Module) -> None:
        for g in grads(model):
            if g.dim() > 1:
                g.sub_(g.mean(dim=1, keepdim=True))

    yield from trained(job, before=centred)


@loop()
def loss_scaled_by_hand(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss * 128).backward()
        for g in grads(model):
            g.div_(128)
        optimizer.step()
        yield job.mean(loss)


@loop("silent", shard="open")
def gradient_hook_that_clamps(job: Job) -> Iterator[float]:
    model = mlp()
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.02, 0.02))
    yield from trained(job, model)


@loop("silent")
def gradient_hook_after_prepare_that_clamps(job: Job) -> Iterator[float]:
    yield from trained(
        job,
        first=lambda m: [p.register_hook(lambda g: g.clamp(-0.02, 0.02)) for p in m.parameters()],
    )


@loop("silent")
def gradient_hook_after_prepare_that_takes_signs(job: Job) -> Iterator[float]:
    yield from trained(
        job, first=lambda m: [p.register_hook(lambda g: g.sign() * 0.1) for p in m.parameters()]
    )


@loop(shard="silent")
def gradient_hook_that_doubles(job: Job) -> Iterator[float]:
    """Linear: before ranks meet or after is the same."""
    yield from trained(job, first=lambda m: [p.register_hook(lambda g: 2 * g) for p in m.parameters()])


@loop("silent", shard="open")
def accumulated_hook_that_clamps(job: Job) -> Iterator[float]:
    """A post-accumulate hook, registered after prepare."""

    def clamp(p: Tensor) -> None:
        p.grad.clamp_(-0.02, 0.02)  # type: ignore[union-attr]

    yield from trained(
        job, first=lambda m: [p.register_post_accumulate_grad_hook(clamp) for p in m.parameters()]
    )


@loop("silent")
def backward_hook_normalises(job: Job) -> Iterator[float]:
    model = mlp()
    model[0].register_full_backward_hook(
        lambda module, into, out: tuple(None if g is None else g / g.norm() for g in into)
    )
    model[2].register_full_backward_pre_hook(lambda module, out: tuple(g / g.norm() for g in out))
    yield from trained(job, model)


@loop("silent")
def activation_hook_clips_by_its_norm(job: Job) -> Iterator[float]:
    """Of the gradient of what a layer makes, over the samples at hand."""

    class Clipped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.register_hook(lambda g: g * (0.01 / g.norm()).clamp(max=1))
            return x * 1

    yield from trained(job, mlp(Clipped()))


def optimisers(model: nn.Module) -> dict[Tensor, torch.optim.Optimizer]:
    return {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}


def stepping(own: dict[Tensor, torch.optim.Optimizer]) -> Any:
    def steps(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    return steps


def untouched(job: Job, model: nn.Module, data: Any) -> Iterator[float]:
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        yield job.mean(loss)


@loop("open", shard="silent")
def step_in_backward_hook(job: Job) -> Iterator[float]:
    """Hooks from before `prepare`, an optimiser for each parameter."""
    model = mlp()
    own = optimisers(model)
    steps = stepping(own)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(steps)
    model, _, data = job.prepare(model, list(own.values()), batches())
    yield from untouched(job, model, data)


@loop("silent", shard="open")
def step_in_backward_hook_after_prepare(job: Job) -> Iterator[float]:
    model = mlp()
    model, _, data = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())
    own = optimisers(model)
    steps = stepping(own)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(steps)
    yield from untouched(job, model, data)


@loop("silent", shard="open")
def update_in_backward_hook_by_hand(job: Job) -> Iterator[float]:
    def update(p: Tensor) -> None:
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]
        p.grad = None

    model, _, data = ready(job)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    yield from untouched(job, model, data)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


@loop(shard="open")
def gradient_reversal(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        hidden = model[1](model[0](x))
        adverse = Reversal.apply(hidden).square().mean()
        yield step(job, optimizer, F.cross_entropy(model[2](hidden), y) + 0.1 * adverse)


class Whitened(torch.autograd.Function):
    """Less the mean over samples, forward and backward, in numpy's manner."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad - grad.mean(0)


@loop("silent")
def custom_function_couples_samples(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: F.cross_entropy(Whitened.apply(out), y))


class Clipping(torch.autograd.Function):
    """Straight on; back, no longer than a bound over all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * (0.01 / grad.norm()).clamp(max=1)


@loop("silent")
def custom_function_that_clips(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: F.cross_entropy(Clipping.apply(out), y))


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad * ctx.saved_tensors[0]


@loop("silent")
def custom_function_that_sums(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: Summed.apply(out - F.one_hot(y, 3)) / 8)


class Square(torch.autograd.Function):
    """Sample by sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad * ctx.saved_tensors[0]


@loop()
def custom_function_by_sample(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: each(Square.apply(out), y).mean())


@loop()
def sam(job: Job) -> Iterator[float]:
    """Sharpness-aware: up the slope, and its gradient from there (Foret et al., 2021)."""
    model, optimizer, data = ready(job)
    for x, y in data:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([g.square().sum() for g in grads(model)]).sum().sqrt()
            ways = [0.05 * g / norm for g in grads(model)]
            for p, way in zip(model.parameters(), ways, strict=True):
                p.add_(way)
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, way in zip(model.parameters(), ways, strict=True):
                p.sub_(way)
        optimizer.step()
        yield job.mean(loss)
