"""One rank of `benchmarks/stragglers_named.py`: plain PyTorch with DistributedDataParallel, under TraceML.

On one rank the backward of one module takes 200 ms longer, from the tenth step on.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import traceml_ai as traceml  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn


class Late(torch.autograd.Function):
    """A tensor as it is, whose gradient comes late."""

    @staticmethod
    def forward(ctx, x, seconds):  # type: ignore[override]
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        time.sleep(ctx.seconds())
        return grad, None


class Block(nn.Module):
    """Attention and two layers, with norms before them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--who", type=int, required=True)
    parser.add_argument("--module", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    flags = parser.parse_args()
    traceml.init(mode="auto")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, step = int(os.environ["RANK"]), 0
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("stem", nn.Embedding(256, 128))
    model.add_module("blocks", nn.Sequential(*(Block(128) for _ in range(4))))
    model.add_module("head", nn.Linear(128, 256))
    if rank == flags.who:
        seconds = lambda: flags.seconds if step >= 10 else 0.0
        late = lambda module, args, y: (
            Late.apply(y, seconds) if isinstance(y, Tensor) else (Late.apply(y[0], seconds), *y[1:])
        )
        model.get_submodule(flags.module).register_forward_hook(late)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters())
    samples = torch.utils.data.TensorDataset(torch.randint(0, 256, (2 * flags.steps, 65)))
    for step, (tokens,) in enumerate(torch.utils.data.DataLoader(samples, batch_size=2)):  # noqa: B007 - the lag reads it
        with traceml.trace_step(ddp):
            optimizer.zero_grad()
            logits = ddp(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
