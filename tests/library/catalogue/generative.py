"""Several models, noise, penalties."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.catalogue import batches, loop
from unisono.library import Job

Noise = Callable[[Tensor], Tensor]


def gan(job: Job, noise: Noise) -> Iterator[float]:
    maker = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
    judge = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    makes = torch.optim.Adam(maker.parameters(), lr=1e-2)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-2)
    maker, makes = job.prepare(maker, makes)
    judge, judges, data = job.prepare(judge, judges, batches(size=7))
    bce = F.binary_cross_entropy_with_logits
    for x, _ in data:
        made = maker(noise(x))
        real, fake = judge(x), judge(made.detach())
        loss = bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))
        judges.zero_grad()
        loss.backward()
        judges.step()
        fooled = judge(made)
        fooling = bce(fooled, torch.ones_like(fooled))
        makes.zero_grad()
        fooling.backward()
        makes.step()
        yield job.mean(loss)
        yield job.mean(fooling)


@loop("told J12")
def gan_with_noise_of_the_loop(job: Job) -> Iterator[float]:
    yield from gan(job, lambda x: torch.randn(len(x), 4))


@loop()
def gan_with_the_generator(job: Job) -> Iterator[float]:
    yield from gan(job, lambda x: job.generator.randn(len(x), 4))


@loop(shard="refused J18")
def wgan_gp(job: Job) -> Iterator[float]:
    critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    critic, optimizer, data = job.prepare(critic, optimizer, batches())
    for x, _ in data:
        between = (x * job.generator.rand(len(x), 1)).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(x * 0.5).mean() - critic(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


def diffusion(job: Job, times: Noise, noise: Noise) -> Iterator[float]:
    model = nn.Sequential(nn.Linear(7, 32), nn.SiLU(), nn.Linear(32, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches(shuffle=True))
    for _ in range(2):
        for x, _ in data:
            t, e = times(x), noise(x)
            level = (t / 10).unsqueeze(1)
            seen = torch.cat([x * (1 - level).sqrt() + e * level.sqrt(), level], 1)
            loss = F.mse_loss(model(seen), e)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield job.mean(loss)


@loop("told J12")
def diffusion_with_noise_of_the_loop(job: Job) -> Iterator[float]:
    yield from diffusion(job, lambda x: torch.randint(10, (len(x),)), torch.randn_like)


@loop()
def diffusion_with_the_generator(job: Job) -> Iterator[float]:
    yield from diffusion(job, lambda x: job.generator.randint(0, 10, (len(x),)), job.generator.randn_like)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.back = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mean, log = self.code(x).chunk(2, dim=1)
        noise = torch.randn_like(mean) if noise is None else noise
        divergence = 0.5 * (mean.square() + log.exp() - log - 1).sum(1)
        return self.back(mean + noise * (log / 2).exp()), divergence


def vae(job: Job, given: bool) -> Iterator[float]:
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, _ in data:
        back, divergence = model(x, job.generator.randn(len(x), 4) if given else None)
        loss = F.mse_loss(back, x) + 0.1 * divergence.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop("told J13")
def vae_that_draws_inside(job: Job) -> Iterator[float]:
    yield from vae(job, False)


@loop()
def vae_with_the_generator(job: Job) -> Iterator[float]:
    yield from vae(job, True)


@loop(shard="equal")
def target_network(job: Job) -> Iterator[float]:
    """Q-learning: a copy is left behind, and catches up by load_state_dict."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    import copy

    target = copy.deepcopy(model).requires_grad_(False)
    for number, (x, y) in enumerate(data):
        with torch.no_grad():
            wanted = 1 + 0.9 * target(x * 0.5).max(1).values
        loss = F.smooth_l1_loss(model(x).gather(1, y[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 2:
            target.load_state_dict(model.state_dict())
        yield job.mean(loss)


@loop()
def distillation(job: Job) -> Iterator[float]:
    """The teacher is prepared by nobody."""
    teacher = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).eval().requires_grad_(False)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        out = model(x)
        kept = F.kl_div(out.log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
        loss = kept + F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield job.mean(loss)


@loop()
def gradient_noise(job: Job) -> Iterator[float]:
    """Langevin: noise on what is the same on every rank."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 + 0.1 * torch.rand(()).item())
        optimizer.step()
        yield job.mean(loss)
