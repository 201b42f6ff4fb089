"""A mixture of experts on three hosts, one of which leaves: `python unreliable_experts.py` starts all four processes.

The trainer has the gate; each host has four experts and their optimisers. Host 3 leaves after 300 updates of these.
"""

import threading

import torch
from torch import nn

import unisono.rpc as rpc
from unisono.rpc import RemoteExperts, host_experts

WIDTH, GRID, HOSTS = 16, (3, 4), ("worker1", "worker2", "worker3")


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))


def train() -> None:
    torch.manual_seed(0)
    layer = RemoteExperts(WIDTH, GRID, HOSTS, k=4, timeout=5.0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
    for step in range(1, 201):
        x = torch.randn(128, WIDTH)
        loss = nn.functional.mse_loss(layer(x), torch.tanh(2 * x @ turn)) + 0.01 * layer.balance_loss(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            there = len(layer.directory.present())
            missed = layer.unanswered + layer.untaught
            print(
                f"step {step}  loss {loss:.3f}  {there} experts  {missed} calls without an answer", flush=True
            )


worker = rpc.init(workers=4)
if worker.info.rank == 0:
    train()
    rpc.shutdown()
else:
    torch.manual_seed(worker.info.rank)
    hosted = host_experts(
        {f"{worker.info.rank - 1}.{n}": expert() for n in range(4)},
        lambda params: torch.optim.Adam(params, lr=3e-3),
    )
    while worker.info.rank == 3 and sum(each.updates for each in hosted.values()) < 300:
        threading.Event().wait(0.01)
    rpc.shutdown(graceful=worker.info.rank != 3)
