"""Loops that go around `.backward()`, and statistics of a batch: of gradients, hooks, generators, samples that meet."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.catalogue import batches, loop, samples
from unisono.library import Job

Act = Callable[..., Any]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def ready(job: Job, model: nn.Module | None = None, data: Any = None, lr: float = 0.1) -> Any:
    model = model or mlp()
    return job.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), data or batches())


def trained(job: Job, parts: Any, loss_of: Act, before: Act = lambda: None) -> Iterator[float]:
    """loss_of(model, x, y)."""
    model, optimizer, data = parts
    for x, y in data:
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        before()
        optimizer.step()
        yield job.mean(loss)


def cross(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


# Gradients that no backward makes.


@loop(shard="refused J29")
def gradients_by_autograd_grad(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        loss = cross(model, x, y)
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g * 0.5
        optimizer.step()
        yield job.mean(loss)


@loop(shard="refused J29")
def gradients_added_in_place(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        optimizer.zero_grad(set_to_none=False)
        loss = cross(model, x, y)
        params = list(model.parameters())
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad.add_(g)
        optimizer.step()
        yield job.mean(loss)


@loop("told J26", shard="refused J29")
def projected_gradients(job: Job) -> Iterator[float]:
    """As PCGrad does: a product of two gradients of this rank's."""
    model, optimizer, data = ready(job)
    for x, y in data:
        out = model(x)
        losses = F.cross_entropy(out, y), out.square().mean()
        params = list(model.parameters())
        one, other = (torch.autograd.grad(loss, params, retain_graph=True) for loss in losses)
        for p, a, b in zip(params, one, other, strict=True):
            p.grad = a - (a * b).sum() / b.square().sum() * b + b
        optimizer.step()
        yield job.mean(losses[0])


@loop(shard="refused J29")
def gradients_by_torch_func(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(own: Any) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, own, (x,)), y)  # noqa: B023

        grads, loss = torch.func.grad_and_value(loss_of)(params)
        for name, p in model.named_parameters():
            p.grad = grads[name]
        optimizer.step()
        yield job.mean(loss)


@loop(shard="refused J29")
def clipped_by_sample(job: Job) -> Iterator[float]:
    """As differentially private training does."""
    model, optimizer, data = ready(job)
    for x, y in data:
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(own: Any, x: Tensor, y: Tensor) -> Tensor:
            out = torch.func.functional_call(model, own, (x[None],))
            return F.cross_entropy(out, y[None])

        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.cat([g.flatten(1) for g in each.values()], 1).norm(dim=1)
        for name, p in model.named_parameters():
            factor = (0.5 / norms).clamp(max=1).view(-1, *[1] * p.dim())
            p.grad = (each[name] * factor).mean(0)
        optimizer.step()
        yield float(sum(p.detach().sum() for p in model.parameters()))


@loop("told J10", shard="refused J29")
def inner_step_of_maml(job: Job) -> Iterator[float]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        params = dict(model.named_parameters())
        grads = torch.autograd.grad(cross(model, x, y), list(params.values()), create_graph=True)
        fast = {name: p - 0.5 * g for (name, p), g in zip(params.items(), grads, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)

    yield from trained(job, ready(job), loss_of)


@loop()
def stepped_as_gradients_arrive(job: Job) -> Iterator[float]:
    model = mlp()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    model, optimizers, data = job.prepare(model, optimizers, batches())
    for optimizer in optimizers:
        (p,) = optimizer.param_groups[0]["params"]

        def step(_: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    for x, y in data:
        loss = cross(model, x, y)
        loss.backward()
        yield job.mean(loss)


# Hooks.


@loop()
def hook_that_clamps(job: Job) -> Iterator[float]:
    model = mlp()
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.02, 0.02))
    yield from trained(job, ready(job, model), cross)


@loop()
def hook_that_clamps_after_prepare(job: Job) -> Iterator[float]:
    parts = ready(job)
    handles = [p.register_hook(lambda g: g.clamp(-0.02, 0.02)) for p in parts[0].parameters()]
    yield from trained(job, parts, cross)
    for handle in handles:
        handle.remove()
    yield from trained(job, parts, cross)


@loop()
def hooks_on_accumulated_gradients(job: Job) -> Iterator[float]:
    """Each backward's gradient is clipped by itself."""
    model, optimizer, data = ready(job)
    for p in model.parameters():
        p.register_hook(lambda g: g / (g.norm() + 1e-3))
    for x, y in data:
        optimizer.zero_grad()
        with job.accumulate():
            F.cross_entropy(model(x), y).backward()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop("told J27")
def module_hook_that_normalises(job: Job) -> Iterator[float]:
    model = mlp()
    model[1].register_full_backward_hook(lambda m, gi, go: (gi[0] / gi[0].norm(),))
    yield from trained(job, ready(job, model), cross)


@loop("told J27")
def hook_inside_the_forward_that_clamps(job: Job) -> Iterator[float]:
    class Clamped(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self[1](self[0](x))
            hidden.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
            return self[2](hidden)

    yield from trained(job, ready(job, Clamped(*mlp())), cross)


@loop()
def hooks_that_scale_and_look(job: Job) -> Iterator[float]:
    """As gradient reversal does, and as logs do."""
    seen: list[float] = []
    model = mlp()
    model[1].register_full_backward_hook(lambda m, gi, go: (-0.5 * gi[0],))
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append(float(go[0].norm())))
    yield from trained(job, ready(job, model), cross)


# Generators of one's own.


@loop("told J16")
def noise_of_a_torch_generator(job: Job) -> Iterator[float]:
    own = torch.Generator().manual_seed(1)
    yield from trained(
        job, ready(job), lambda m, x, y: cross(m, x + 0.3 * torch.randn(x.shape, generator=own), y)
    )


@loop("told J16")
def noise_of_a_numpy_generator(job: Job) -> Iterator[float]:
    own = np.random.default_rng(1)
    yield from trained(
        job, ready(job), lambda m, x, y: cross(m, x + torch.from_numpy(own.normal(size=x.shape)), y)
    )


@loop("told J16")
def noise_of_a_python_generator(job: Job) -> Iterator[float]:
    own = random.Random(1)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross(model, x * torch.tensor([own.random() for _ in x]).view(-1, 1), y)

    yield from trained(job, ready(job), loss_of)


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        self.rows, self.numpy = samples(), np.random.default_rng(2)
        self.torch, self.python = torch.Generator().manual_seed(2), random.Random(2)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        x, y = self.rows[i]
        noise = self.numpy.normal() + self.python.random() + torch.randn((), generator=self.torch)
        return x + noise, y


@loop()
def data_set_with_generators_of_its_own(job: Job) -> Iterator[float]:
    yield from trained(job, ready(job, data=batches(Noisy())), cross)


@loop()
def orders_of_a_generator_of_ones_own(job: Job) -> Iterator[float]:
    own = torch.Generator().manual_seed(1)
    model, optimizer, data = ready(job)
    for x, y in data:
        order = torch.randperm(5, generator=own)
        loss = cross(model, x * (1 + order[0]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


# Samples that meet where no gradient goes, and statistics of the batch.


def scored(model: nn.Module, x: Tensor, y: Tensor, advantage: Tensor) -> Tensor:
    chosen = model(x).log_softmax(1).gather(1, y[:, None])[:, 0]
    return -(advantage * chosen).mean()


@loop("told J10")
def advantages_by_their_spread(job: Job) -> Iterator[float]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        reward = x.sum(1)
        return scored(model, x, y, (reward - reward.mean()) / (reward.std() + 1e-3))

    yield from trained(job, ready(job), loss_of)


@loop()
def advantages_by_the_spread_of_all(job: Job) -> Iterator[float]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        reward = x.sum(1)
        every = job.gather(reward)
        return scored(model, x, y, (reward - every.mean()) / (every.std() + 1e-3))

    yield from trained(job, ready(job), loss_of)


@loop()
def advantages_without_their_mean_over_all(job: Job) -> Iterator[float]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        reward = x.sum(1)
        return scored(model, x, y, reward - job.mean(reward.mean()))

    yield from trained(job, ready(job), loss_of)


@loop("told J10")
def inputs_normalised(job: Job) -> Iterator[float]:
    yield from trained(job, ready(job), lambda m, x, y: cross(m, (x - x.mean(0)) / (x.std(0) + 1e-3), y))


@loop()
def inputs_by_their_own_spread(job: Job) -> Iterator[float]:
    yield from trained(
        job, ready(job), lambda m, x, y: cross(m, (x - x.mean(1, True)) / x.std(1, keepdim=True), y)
    )


@loop("told J10")
def weights_of_classes_in_the_batch(job: Job) -> Iterator[float]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weights = 1 / torch.bincount(y, minlength=3).clamp(min=1).to(x.dtype)
        return (F.cross_entropy(model(x), y, reduction="none") * weights[y]).mean()

    yield from trained(job, ready(job), loss_of)


@loop("told J10")
def loss_over_itself(job: Job) -> Iterator[float]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = cross(model, x, y)
        return loss / loss.detach()

    yield from trained(job, ready(job), loss_of)


def inside(act: Act) -> nn.Module:
    """A model in which `act` is done to hidden rows."""

    class Inside(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](act(self[1](self[0](x))))

    return Inside(*mlp())


def in_the_model(job: Job, act: Act) -> Iterator[float]:
    yield from trained(job, ready(job, inside(act)), cross)


@loop("told J10")
def flipped_samples(job: Job) -> Iterator[float]:
    yield from in_the_model(job, lambda h: h - 0.5 * h.flip(0))


@loop("told J10")
def cumulated_samples(job: Job) -> Iterator[float]:
    yield from in_the_model(job, lambda h: h.cumsum(0) / 4)


@loop("told J10")
def sorted_samples(job: Job) -> Iterator[float]:
    yield from in_the_model(job, lambda h: h.sort(0)[0])


@loop("told J10")
def rolled_samples(job: Job) -> Iterator[float]:
    yield from in_the_model(job, lambda h: h * h.roll(1, 0))


@loop("told J10")
def attention_over_samples(job: Job) -> Iterator[float]:
    yield from in_the_model(job, lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0])


@loop("told J10")
def attention_by_hand_over_samples(job: Job) -> Iterator[float]:
    yield from in_the_model(job, lambda h: (h @ h.T / 4).softmax(1) @ h)


@loop("told J10")
def spectrum_over_samples(job: Job) -> Iterator[float]:
    yield from in_the_model(job, lambda h: torch.fft.fft(h, dim=0).abs())


@loop("told J10")
def batch_norm_by_hand(job: Job) -> Iterator[float]:
    model = inside(lambda h: F.batch_norm(h, None, None, training=True))
    yield from trained(job, ready(job, model, batches(samples(24))), cross)


@loop("told J10")
def hidden_rows_over_the_largest(job: Job) -> Iterator[float]:
    yield from in_the_model(job, lambda h: h / h.detach().abs().max())


@loop()
def attention_within_samples(job: Job) -> Iterator[float]:
    def act(h: Tensor) -> Tensor:
        q = h.view(-1, 4, 2, 2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q.flip(2).cumsum(2), q, is_causal=True)
        return mixed.transpose(1, 2).reshape(len(h), 16)

    yield from in_the_model(job, act)


@loop("told J10")
def padded_to_the_longest(job: Job) -> Iterator[float]:
    """A mean over all numbers, of which a rank whose samples are long has more."""

    def padded(rows: Any) -> Any:
        xs, ys = zip(*rows, strict=True)
        longest = max(1 + int(abs(x[0]) * 3) for x in xs)
        return torch.stack([x[0].repeat(longest) for x in xs]), torch.stack(ys)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x[..., None])

    rows = samples()
    data = batches([rows[i] for i in range(len(rows))], collate_fn=padded)
    yield from trained(
        job, ready(job, Words(), data), lambda m, x, y: (m(x) - y.view(-1, 1, 1)).square().mean()
    )


@loop("told J10 J30", shard="told J10 J30")
def way_by_a_mean(job: Job) -> Iterator[float]:
    def act(h: Tensor) -> Tensor:
        return torch.tanh(2 * h) if h.mean() > 0 else torch.sin(h).cos()

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross(model, x + x.mean().sign(), y)

    yield from trained(job, ready(job, inside(act), batches(size=6)), loss_of)


class Halved(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, t: Tensor) -> Tensor:
        ctx.save_for_backward(p, t)
        return (p - t).square().sum() / len(p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, t = ctx.saved_tensors
        return grad * 2 * (p - t) / len(p) ** 2, None


@loop("told J31")
def custom_function_over_the_samples(job: Job) -> Iterator[float]:
    yield from trained(job, ready(job), lambda m, x, y: Halved.apply(m(x), F.one_hot(y, 3).to(x.dtype)))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -0.3 * grad


@loop()
def custom_function_of_each_sample(job: Job) -> Iterator[float]:
    yield from in_the_model(job, Reversed.apply)


# Shards that are touched as if they were whole.


@loop()
def drawn_anew_after_prepare(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    yield from trained(job, (model, optimizer, data), cross)
    model[2].reset_parameters()
    with torch.no_grad():
        model[0].weight.uniform_(-0.2, 0.2)
    yield from trained(job, (model, optimizer, data), cross)


@loop()
def weights_channels_last(job: Job) -> Iterator[float]:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 4, 2), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x.view(-1, 2, 3, 1).expand(-1, 2, 3, 2)).flatten(1))

    model = Images().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    yield from trained(job, ready(job, model), cross)


@loop(shard="refused J29")
def weights_read_outside_the_forward(job: Job) -> Iterator[float]:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        w = parts[0][0].weight
        return cross(model, x, y) + 0.05 * (w.T @ w - torch.eye(6)).square().sum()

    parts = ready(job)
    yield from trained(job, parts, loss_of)


@loop(shard="refused J29")
def submodules_called_alone(job: Job) -> Iterator[float]:
    yield from trained(job, ready(job), lambda m, x, y: F.cross_entropy(m[2](m[1](m[0](x))), y))


@loop(shard="refused J29")
def adafactor_steps(job: Job) -> Iterator[float]:
    model = mlp()
    parts = job.prepare(model, torch.optim.Adafactor(model.parameters(), lr=1e-2), batches())
    yield from trained(job, parts, cross)


@loop(shard="refused J29")
def rprop_steps(job: Job) -> Iterator[float]:
    model = mlp()
    parts = job.prepare(model, torch.optim.Rprop(model.parameters(), lr=1e-2), batches())
    yield from trained(job, parts, cross)


@loop(shard="told J15")
def a_weight_taken_before_prepare(job: Job) -> Iterator[float]:
    model = mlp()
    w = model[0].weight
    yield from trained(job, ready(job, model), lambda m, x, y: cross(m, x, y) + 0.1 * w.square().sum())


@loop()
def a_leftover_variable_of_a_loop(job: Job) -> Iterator[float]:
    model = mlp()
    p = None
    for p in model.parameters():
        p.requires_grad_(True)
    yield from trained(job, ready(job, model), cross)
    assert p is not None
