"""Your own loop on several processes, in three lines (marked); without them it is a script for one device.

python examples/own_loop.py
torchrun --standalone --nproc-per-node 2 examples/own_loop.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono  # 1

torch.manual_seed(0)
points = torch.rand(1000, 2) * 4 - 2
rings = (points.norm(dim=1) * 2).long().clamp(max=3)  # which of four rings around the origin

model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(points, rings), batch_size=96, shuffle=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * len(data))

job = unisono.init()  # 2: as many ranks as were started; plan="dp=2 shard=2" says more
model, optimizer, data = job.prepare(model, optimizer, data)  # 3

losses = []
for epoch in range(4):
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    mean = sum(losses[-len(data) :]) / len(data)
    mean = job.mean(mean)  # to print: over the samples of all ranks, not this one's alone
    if job.is_main:
        print(f"epoch {epoch}  loss {mean:.4f}")
