"""Loops as users write them, run on one device and on several ranks. Imported by the tests; runs in ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.library import Job


class Net(nn.Module):
    """Blocks in a list, a tied weight, and a part that no batch reaches."""

    def __init__(self, width: int = 32, unused: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(width, 3)
        self.spare = nn.Linear(width, 3) if unused else None
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale


def samples(count: int = 50) -> TensorDataset:
    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(count, 6, generator=drawn, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count,), generator=drawn))


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
}


def losses(
    job: Job | None,
    *,
    optimizer: str = "adamw",
    count: int = 50,
    batch: int = 12,
    epochs: int = 2,
    micro: int = 1,
    clip: float = 0.0,
    unused: bool = False,
    plain: bool = False,
    workers: int = 0,
    fine: bool = False,
) -> dict[str, Any]:
    """An ordinary loop; `job` None is one device. Losses are means over the global batch."""
    torch.manual_seed(3 if job is None or job.rank == 0 else 99)  # weights and order must become rank 0's
    model = Net(unused=unused).double()
    opt = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step)
    torch.manual_seed(4)
    data: Any = DataLoader(samples(count), batch_size=batch, shuffle=True, num_workers=workers)
    if plain:
        data = [samples(count)[i : i + batch] for i in range(0, count, batch)]
    if job is not None:
        blocks = list(model.blocks) if fine else None
        given = (model, opt)
        model, opt, data = job.prepare(model, opt, data, blocks=blocks)
        if (model, opt) != given:
            raise ValueError("prepare gave other objects")
    seen = []
    for _ in range(epochs):
        for number, (x, y) in enumerate(data):
            last = (number + 1) % micro == 0 or number + 1 == len(data)
            loss = F.cross_entropy(model(x), y) / micro
            if job is not None and not last:
                with job.accumulate():
                    loss.backward()
            else:
                loss.backward()
            seen.append(job.mean(loss) if job is not None else loss.item())
            if not last:
                continue
            if clip:
                if job is None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                else:
                    job.clip(clip)
            if optimizer == "lbfgs":

                def closure() -> torch.Tensor:
                    opt.zero_grad()
                    again = F.cross_entropy(model(x), y)  # noqa: B023
                    again.backward()
                    return torch.tensor(job.mean(again)) if job is not None else again

                opt.step(closure)
            else:
                opt.step()
            schedule.step()
            opt.zero_grad()
    weights = job.weights() if job is not None else model.state_dict()
    return {
        "losses": seen,
        "weights": {name: value.flatten().tolist() for name, value in weights.items()},
        "steps": job.step if job is not None else 0,
    }


def on_ranks(ctx: Any, plan: str, each: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several loops by name, each with a job of its own."""
    return {name: losses(unisono.init(plan, context=ctx), **settings) for name, settings in each.items()}


def alone(ctx: Any, each: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: losses(None, **settings) for name, settings in each.items()}
