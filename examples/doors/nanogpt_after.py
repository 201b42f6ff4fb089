"""A training script in the shape of nanoGPT's train.py (Karpathy, 2022)."""

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from small_gpt import GPT, GPTConfig

import unisono

out_dir = "out"
eval_interval, eval_iters, log_interval = 4, 2, 1
gradient_accumulation_steps, batch_size, block_size = 2, 8, 16
learning_rate, min_lr, warmup_iters, lr_decay_iters, max_iters = 1e-2, 1e-3, 2, 8, 8
weight_decay, betas, grad_clip = 0.1, (0.9, 0.95), 1.0
torch.manual_seed(1337)

text = np.frombuffer(Path(__file__).with_name("small_gpt.py").read_bytes(), dtype=np.uint8)
data = {"train": text[:-500], "val": text[-500:]}


def get_batch(split):
    starts = torch.randint(len(data[split]) - block_size, (batch_size,)).tolist()
    rows = torch.stack([torch.tensor(data[split][i : i + block_size + 1].astype(np.int64)) for i in starts])
    return rows[:, :-1], rows[:, 1:]


def configure_optimizers(model):
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


model = GPT(GPTConfig(block_size=block_size))
model.init_weights()
optimizer = configure_optimizers(model)
job = unisono.init()
print = job.ranks.print
model, optimizer = job.prepare(model, optimizer)
batches = {split: iter(job.deal(iter(lambda split=split: get_batch(split), None))) for split in data}


def loss_of(x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = next(batches[split])
            losses[k] = job.mean(loss_of(X, Y))
        out[split] = losses.mean().item()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min((it - warmup_iters) / (lr_decay_iters - warmup_iters), 1.0)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


history = []
X, Y = next(batches["train"])
for iter_num in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        history += losses.values()
        if iter_num > 0:
            job.save(out_dir, {"iter": iter_num})
    for _ in range(gradient_accumulation_steps):
        loss = loss_of(X, Y) / gradient_accumulation_steps
        X, Y = next(batches["train"])
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        lossf = job.mean(loss) * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}")
        history.append(lossf)
