"""What a model is made of, and when: norms of weights, new values, new layers, shared ones."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.library.catalogue import batches, loop
from tests.library.catalogue.plain import mlp, ready, sgd, step, trained
from unisono.library import Job


@loop(shard="silent")
def reinit_with_nn_init(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    nn.init.normal_(model[0].weight, 0, 0.1)
    for x, y in data:
        yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop(shard="silent")
def reset_parameters_mid_run(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for epoch in range(2):
        if epoch:
            model[2].reset_parameters()
        for x, y in data:
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop(shard="silent")
def weights_drawn_in_place(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.3, 0.3)
    for x, y in data:
        yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop(shard="silent")
def layers_drawn_anew_after_prepare(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    nn.init.xavier_uniform_(model[2].weight)
    nn.init.kaiming_normal_(model[0].weight)
    for x, y in data:
        yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop(shard="silent")
def noise_on_weights(job: Job) -> Iterator[float]:
    """Shrink and perturb (Ash and Adams, 2020): drawn outside of batches, so alike on all ranks."""
    model, optimizer, data = ready(job)
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9).add_(torch.randn_like(p), alpha=0.01)
        for x, y in data:
            yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop(shard="open")
def dead_units_drawn_anew(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for number, (x, y) in enumerate(data):
        yield step(job, optimizer, F.cross_entropy(model(x), y))
        if number == 0:
            with torch.no_grad():
                model[0].weight[:3] = torch.randn(3, 6) * 0.1


@loop()
def old_weight_norm(job: Job) -> Iterator[float]:
    model = mlp()
    nn.utils.weight_norm(model[0])
    yield from trained(job, model)


@loop()
def parametrized_weight_norm(job: Job) -> Iterator[float]:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    yield from trained(job, model)


@loop()
def spectral_norm(job: Job) -> Iterator[float]:
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[0])
    yield from trained(job, model)


@loop()
def orthogonal(job: Job) -> Iterator[float]:
    model = mlp()
    nn.utils.parametrizations.orthogonal(model[0])
    yield from trained(job, model)


@loop()
def save_on_cpu_hooks(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for x, y in data:
        with torch.autograd.graph.save_on_cpu():
            loss = F.cross_entropy(model(x), y)
        yield step(job, optimizer, loss)


@loop()
def shared_submodule(job: Job) -> Iterator[float]:
    block = nn.Linear(16, 16)
    yield from trained(job, nn.Sequential(nn.Linear(6, 16), block, nn.Tanh(), block, nn.Linear(16, 3)))


@loop("refused")
def lazy_modules(job: Job) -> Iterator[float]:
    yield from trained(job, nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(3)))


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 12)
        self.head: nn.Linear | None = None
        self.optimizer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        if self.head is None:
            self.head = nn.Linear(12, 3)
            self.optimizer.add_param_group({"params": self.head.parameters()})
        return self.head(x)


@loop("refused")
def module_made_in_first_forward(job: Job) -> Iterator[float]:
    model = Late()
    model.optimizer = sgd(model)
    yield from trained(job, model, optimizer=lambda model: model.optimizer)  # type: ignore[arg-type, return-value]


@loop("refused")
def network_that_grows(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    for number, (x, y) in enumerate(data):
        if number == 1:
            more = nn.Linear(3, 3)
            model.append(more)
            optimizer.add_param_group({"params": more.parameters()})
        yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop(shard="open")
def mean_teacher_in_buffers(job: Job) -> Iterator[float]:
    model = mlp()
    for number, p in enumerate(list(model.parameters())):
        model.register_buffer(f"mean_{number}", p.detach().clone())

    def follow(model: nn.Module) -> None:
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                getattr(model, f"mean_{number}").lerp_(p, 0.1)

    yield from trained(job, model, after=follow)


@loop()
def no_sync_of_frozen_bn(job: Job) -> Iterator[float]:
    """Statistics of a batch norm that stays in evaluation."""
    model = mlp(nn.BatchNorm1d(16))
    yield from trained(job, model, first=lambda model: model[2].eval())


@loop("refused")
def encoder_and_decoder_one_optimiser(job: Job) -> Iterator[float]:
    encoder, decoder = nn.Linear(6, 4), nn.Linear(4, 6)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    encoder, optimizer, data = job.prepare(encoder, optimizer, batches())
    for x, _ in data:
        yield step(job, optimizer, F.mse_loss(decoder(encoder(x)), x))


@loop("refused")
def uncertainty_weights_in_loop(job: Job) -> Iterator[float]:
    model, scales = mlp(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), scales], lr=0.1)
    model, optimizer, data = job.prepare(model, optimizer, batches())
    for x, y in data:
        out = model(x)
        losses = torch.stack([F.cross_entropy(out, y), out.square().mean()])
        yield step(job, optimizer, (losses * (-scales).exp() + scales).sum())


@loop("refused")
def wrapped_in_ddp_too(job: Job) -> Iterator[float]:
    model: Any = mlp()
    if job.world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    yield from trained(job, model)


@loop(shard="open")
def own_all_reduce_of_gradients(job: Job) -> Iterator[float]:
    """Left from before: a mean of what is the same on all ranks already."""

    def meet(model: nn.Module) -> None:
        for p in model.parameters() if job.world > 1 else []:
            torch.distributed.all_reduce(p.grad)
            p.grad /= job.world

    yield from trained(job, before=meet)


@loop("silent", shard="open")
def own_all_reduce_without_the_mean(job: Job) -> Iterator[float]:
    def meet(model: nn.Module) -> None:
        for p in model.parameters() if job.world > 1 else []:
            torch.distributed.all_reduce(p.grad)

    yield from trained(job, before=meet)


@loop("silent")
def rate_times_world(job: Job) -> Iterator[float]:
    """Left from DDP: the rate grows with the ranks."""
    yield from trained(job, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05 * job.world))


@loop("silent")
def loss_times_world(job: Job) -> Iterator[float]:
    yield from trained(job, loss=lambda out, y: F.cross_entropy(out, y) * job.world)


@loop("silent")
def model_drawn_by_rank_after_prepare(job: Job) -> Iterator[float]:
    model, optimizer, data = ready(job)
    own = torch.Generator().manual_seed(job.rank)
    with torch.no_grad():
        model[2].bias.copy_(
            torch.randn(3, generator=own) if job.plan.shard == 1 else model[2].bias + job.rank
        )
    for x, y in data:
        yield step(job, optimizer, F.cross_entropy(model(x), y))


@loop("told")
def batch_renormalised_by_hand(job: Job) -> Iterator[float]:
    """A norm of one's own: statistics by samples, running ones in a buffer."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            own = x.mean(0)
            with torch.no_grad():
                self.mean.lerp_(own, 0.1)
            return x - own

    yield from trained(job, mlp(Norm()))


@loop()
def group_and_layer_norms(job: Job) -> Iterator[float]:
    yield from trained(job, mlp(nn.LayerNorm(16), nn.GroupNorm(4, 16)))


@loop("silent")
def batch_norm_by_function(job: Job) -> Iterator[float]:
    """`F.batch_norm` in a module that nobody knows for one."""

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(x, None, None, training=True)

    yield from trained(job, mlp(Norm()))


@loop(shard="open")
def odd_layouts(job: Job) -> Iterator[float]:
    """A transposed weight, a scalar, an empty one, one of a single row."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(3, 6).mul_(0.3).t())
            self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0))
            self.row = nn.Parameter(torch.randn(1, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.a) * self.scale + self.row + self.none.sum()

    yield from trained(job, Odd())


@loop()
def channels_last(job: Job) -> Iterator[float]:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )
    yield from trained(job, model.to(memory_format=torch.channels_last))


@loop()
def compiled_aot_eager(job: Job) -> Iterator[float]:
    model = mlp()
    yield from trained(job, torch.compile(model, backend="aot_eager"), epochs=1)  # type: ignore[arg-type]
