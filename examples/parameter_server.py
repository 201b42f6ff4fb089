"""A parameter server and two trainers, by remote calls: `python parameter_server.py` starts all three on this host.

Each trainer pulls the weights, computes gradients of its own batches, and pushes them; the server updates at once.
"""

import threading

import torch
from torch import nn

import unisono.rpc as rpc


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


@rpc.exported
class Server:
    def __init__(self, lr: float) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.lock, self.updates = threading.Lock(), 0

    def pull(self) -> tuple[int, list[torch.Tensor]]:
        with self.lock:
            return self.updates, [p.detach().clone() for p in self.model.parameters()]

    def push(self, version: int, gradients: tuple[torch.Tensor, ...]) -> int:
        with self.lock:
            for p, gradient in zip(self.model.parameters(), gradients, strict=True):
                p.grad = gradient
            self.optimizer.step()
            self.updates += 1
            return self.updates - 1 - version  # by others, in between


@rpc.exported
def train(server: rpc.RRef, steps: int, seed: int) -> tuple[float, list[int]]:
    model, losses, stale, random = make_model(), [], [], torch.Generator().manual_seed(seed)
    for _ in range(steps):
        version, weights = server.rpc_sync().pull()
        with torch.no_grad():
            for p, new in zip(model.parameters(), weights, strict=True):
                p.copy_(new)
        x = torch.rand(32, 2, generator=random) * 2 - 1
        loss = nn.functional.mse_loss(model(x), x[:, :1] * x[:, 1:])
        stale.append(server.rpc_sync().push(version, torch.autograd.grad(loss, list(model.parameters()))))
        losses.append(loss.item())
    return sum(losses[-10:]) / 10, stale


if rpc.init(workers=3).info.rank == 0:
    server = rpc.remote("worker0", Server, args=(0.05,))
    runs = [rpc.rpc_async(f"worker{i}", train, args=(server, 300, i)) for i in (1, 2)]
    for loss, stale in rpc.wait_all(runs):
        print(f"loss {loss:.4f}  staleness {sum(stale) / len(stale):.2f} updates", flush=True)
rpc.shutdown()
