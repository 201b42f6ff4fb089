"""Gradients on another way than from `.backward()` to the optimiser."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tests.library.catalogue import loop
from tests.library.catalogue.plain import grads, mlp, ready, step
from unisono.library import Job


def given(model: nn.Module, found: Any) -> None:
    for p, grad in zip(model.parameters(), found, strict=True):
        p.grad = grad.detach()


@loop("silent", shard="raised")
def grads_by_autograd_grad(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        given(model, torch.autograd.grad(loss, list(model.parameters())))
        optimizer.step()
        yield job.mean(loss)


@loop("silent", shard="raised")
def grads_by_autograd_grad_copied(job: Job) -> Iterator[float]:
    """Into gradients that are there already."""
    model, optimizer, data = ready(job)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        for p, grad in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            p.grad.copy_(grad)
        optimizer.step()
        yield job.mean(loss)


@loop("silent", shard="refused")
def maml_inner_step(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        named = dict(model.named_parameters())
        inner = F.cross_entropy(model(x), y)
        slopes = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(named.items(), slopes, strict=True)}
        yield step(job, optimizer, F.cross_entropy(functional_call(model, fast, x), y))


@loop("silent", shard="raised")
def reptile(job: Job) -> Iterator[float]:
    """The gradient is the way that a copy went in steps of its own."""
    copy = mlp()
    model, optimizer, data = ready(job)
    for x, y in data:
        copy.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
        own = torch.optim.SGD(copy.parameters(), lr=0.1)
        for _ in range(2):
            loss = F.cross_entropy(copy(x), y)
            own.zero_grad()
            loss.backward()
            own.step()
        for p, q in zip(model.parameters(), copy.parameters(), strict=True):
            p.grad = (p - q).detach()
        optimizer.step()
        yield job.mean(loss)


def functional(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, params, x), y)


@loop("silent", shard="raised")
def func_grad(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        params = {name: p.detach() for name, p in model.named_parameters()}
        found = torch.func.grad(lambda q: functional(model, q, x, y))(params)  # noqa: B023
        given(model, found.values())
        optimizer.step()
        yield job.mean(functional(model, params, x, y))


@loop("silent", shard="raised")
def func_vjp(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        params = {name: p.detach() for name, p in model.named_parameters()}
        loss, back = torch.func.vjp(lambda q: functional(model, q, x, y), params)  # noqa: B023
        given(model, back(torch.ones_like(loss))[0].values())
        optimizer.step()
        yield job.mean(loss)


@loop("silent", shard="raised")
def forward_gradient(job: Job) -> Iterator[float]:
    """A directional derivative by jvp, times the direction (Baydin et al., 2022)."""
    model, optimizer, data = ready(job)
    for x, y in data:
        params = {name: p.detach() for name, p in model.named_parameters()}
        way = {name: torch.ones_like(p) for name, p in params.items()}
        loss, slope = torch.func.jvp(lambda q: functional(model, q, x, y), (params,), (way,))  # noqa: B023
        given(model, [slope * v for v in way.values()])
        optimizer.step()
        yield job.mean(loss)


@loop("silent")
def evolution_strategy(job: Job) -> Iterator[float]:
    """Two forwards and no backward (as MeZO): the same direction on all ranks, the loss of each rank's samples."""
    model, optimizer, data = ready(job)
    for x, y in data:
        way = [torch.ones_like(p) for p in model.parameters()]
        found = []
        with torch.no_grad():
            for sign in (1, -2):
                for p, v in zip(model.parameters(), way, strict=True):
                    p.add_(v, alpha=sign * 1e-2)
                found.append(F.cross_entropy(model(x), y))
            for p, v in zip(model.parameters(), way, strict=True):
                p.add_(v, alpha=1e-2)
        given(model, [(found[0] - found[1]) / 2e-2 * v for v in way])
        optimizer.step()
        yield job.mean(found[0])


def norms_of_samples(found: dict[str, Tensor]) -> Tensor:
    return sum(g.flatten(1).square().sum(1) for g in found.values()).sqrt()  # type: ignore[union-attr]


@loop("open", shard="open")
def per_sample_clipping(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        params = {name: p.detach() for name, p in model.named_parameters()}
        one = torch.func.grad(lambda q, u, v: functional(model, q, u[None], v[None]))
        found = vmap(one, in_dims=(None, 0, 0))(params, x, y)
        share = (0.5 / norms_of_samples(found)).clamp(max=1)
        given(model, [torch.einsum("b,b...->...", share, g) / len(x) for g in found.values()])
        optimizer.step()
        yield job.mean(functional(model, params, x, y))


@loop("open")
def per_sample_clipping_by_loop(job: Job) -> Iterator[float]:
    """A backward for each sample, clipped, into a sum of one's own."""
    model, optimizer, data = ready(job)
    for x, y in data:
        total = [torch.zeros_like(p) for p in model.parameters()]
        for i in range(len(x)):
            loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for part, p in zip(total, model.parameters(), strict=True):
                part += p.grad / len(x)
        given(model, total)
        optimizer.step()
        yield job.mean(loss)


@loop("silent", shard="raised")
def pcgrad(job: Job) -> Iterator[float]:
    """The part of a task's gradient that is against another's is taken out (Yu et al., 2020)."""
    model, optimizer, data = ready(job)
    for x, y in data:
        out = model(x)
        losses = F.cross_entropy(out, y), out.square().mean()
        one, two = (torch.autograd.grad(v, list(model.parameters()), retain_graph=True) for v in losses)
        meets = sum((a * b).sum() for a, b in zip(one, two, strict=True))
        off = torch.clamp(meets / sum(b.square().sum() for b in two), max=0)
        given(model, [a - off * b + b for a, b in zip(one, two, strict=True)])
        optimizer.step()
        yield job.mean(losses[0])


@loop()
def pcgrad_after_backward(job: Job) -> Iterator[float]:
    """As above, each task's gradients by a backward of their own."""
    model, optimizer, data = ready(job)
    for x, y in data:
        found = []
        for loss in (F.cross_entropy(model(x), y), model(x).square().mean()):
            model.zero_grad()
            loss.backward()
            found.append([g.clone() for g in grads(model)])
        meets = sum((a * b).sum() for a, b in zip(*found, strict=True))
        off = torch.clamp(meets / sum(b.square().sum() for b in found[1]), max=0)
        for p, a, b in zip(model.parameters(), *found, strict=True):
            p.grad = a - off * b + b
        optimizer.step()
        yield job.mean(loss)


@loop("silent", shard="raised")
def gradnorm_weights(job: Job) -> Iterator[float]:
    """Two losses, each over the norm of its gradient in the head."""
    model, optimizer, data = ready(job)
    for x, y in data:
        out = model(x)
        losses = F.cross_entropy(out, y), out.square().mean()
        norms = [torch.autograd.grad(v, model[2].weight, retain_graph=True)[0].norm() for v in losses]
        yield step(job, optimizer, sum(v / n.detach() for v, n in zip(losses, norms, strict=True)))
