"""A mixture of experts on three peers, one of which is killed on the way: `python unreliable_experts.py` starts all.

The trainer keeps the gate and the head. Each peer computes two experts and steps their own optimisers.
"""

import os
import signal

import torch
from torch import nn

import unisono.rpc as rpc

WIDTH = 16
PEERS = ("worker1", "worker2", "worker3")
EXPERTS = {(i, j): peer for i, peer in enumerate(PEERS) for j in range(2)}


@rpc.exported
def vanish() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve(name: str) -> None:
    """Offer this peer's experts to whoever finds them."""
    for point, peer in EXPERTS.items():
        if peer == name:
            torch.manual_seed(10 * point[0] + point[1])
            module = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            rpc.offer(".".join(("expert", *map(str, point))), rpc.Expert(module, optimizer))


def train(steps: int) -> None:
    torch.manual_seed(0)
    stem, head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
    layer = rpc.UnreliableExperts(WIDTH, EXPERTS, k=2, timeout=10.0)
    mine = [p for part in (stem, layer, head) for p in part.parameters()]
    optimizer, losses = torch.optim.SGD(mine, lr=0.1), []
    for step in range(steps):
        if step == steps // 2:
            rpc.rpc_async("worker3", vanish)
        x = torch.rand(64, 2) * 2 - 1
        h = torch.tanh(stem(x))
        loss = nn.functional.mse_loss(head(h + layer(h)), x[:, :1] * x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % (steps // 4) == 0:
            mean = sum(losses[-20:]) / 20
            print(f"step {step + 1}  loss {mean:.4f}  {dict(layer.counts)}", flush=True)


worker = rpc.init(workers=4)
serve(worker.info.name)
if worker.info.rank == 0:
    train(200)
rpc.shutdown()
