"""What ranks do in the tests of other systems' sentences. Results are JSON."""

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import unisono
from tests.library.loops import Net, samples
from unisono.parallel.params import local_of


def drawn(rank: int, count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = samples(48).tensors
    return x[rank * count : (rank + 1) * count], y[rank * count : (rank + 1) * count]


def beside_ddp(ctx: Any) -> dict[str, Any]:
    """The largest difference of a gradient from DDP's: at once, and over two backwards of which one is held back."""
    off = []
    for held in (False, True):
        torch.manual_seed(3)
        theirs, ours = Net(width=64).double(), Net(width=64).double()
        ours.load_state_dict(theirs.state_dict())
        job = unisono.init("dp=2")
        job.prepare(ours, torch.optim.SGD(ours.parameters(), 0.1))
        wrapped = DistributedDataParallel(theirs)
        x, y = drawn(ctx.rank)
        if held:
            with wrapped.no_sync(), job.accumulate():
                F.cross_entropy(wrapped(x * 2), y).backward()
                F.cross_entropy(ours(x * 2), y).backward()
        F.cross_entropy(wrapped(x), y).backward()
        F.cross_entropy(ours(x), y).backward()
        pairs = zip(theirs.parameters(), ours.parameters(), strict=True)
        off.append(max(float((a.grad - b.grad).abs().max()) for a, b in pairs))
    return {"off": off}


def unused_and_early(ctx: Any) -> dict[str, Any]:
    """What is said of parameters that no backward reached, and when the first bucket left: over messages, since sums
    in memory that ranks share take the cores from backward and wait for its end."""
    torch.manual_seed(3)
    job = unisono.init("dp=2 collective=messages", context=ctx)
    parts: list[torch.nn.Module] = []
    for _ in range(12):
        parts += [torch.nn.Linear(1024, 1024), torch.nn.Tanh()]
    model, odd = torch.nn.Sequential(*parts), Net(unused=True)
    job.prepare(odd, torch.optim.SGD(odd.parameters(), 0.1))
    odd(torch.ones(2, 6)).sum().backward()
    first: list[int] = []
    parts[0].weight.register_hook(lambda grad: first.append(time.perf_counter_ns()))
    job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    left: list[int] = []
    count = job.mesh.recorder.count

    def counted(*sent: Any) -> None:
        """Bytes are counted as they leave."""
        left.append(time.perf_counter_ns())
        count(*sent)

    job.mesh.recorder.count = counted  # type: ignore[method-assign]
    model(torch.randn(8, 1024)).sum().backward()
    return {
        "unused": sorted(note.split()[0] for note in job.notes if "no gradient" in note),
        "early": min(left) < first[-1],
        "messages": len(left),
        "parameters": len(list(model.parameters())),
    }


def held(
    ctx: Any, plan: str, steps: int = 0, micro: int = 1, folder: str = "", save: bool = False
) -> dict[str, Any]:
    """Bytes of parameters, gradients and optimiser state on this rank, and losses of some steps."""
    torch.manual_seed(3)
    job = unisono.init(plan, context=ctx)
    model = Net(width=64).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(samples(48), batch_size=12, shuffle=True)
    model, optimizer, data = job.prepare(model, optimizer, data, blocks=list(model.blocks))
    if folder and not save:
        job.load(folder)
    seen, made = [], 0
    sizes: dict[str, int] = {}
    while made < steps:
        for x, y in data:
            made += 1
            loss = F.cross_entropy(model(x), y) / micro
            loss.backward()
            seen.append(job.mean(loss))
            if made % micro:
                continue
            own = list(model.parameters())
            sizes["gradients"] = sum(local_of(p.grad).nbytes for p in own if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
    own = list(model.parameters())
    sizes["parameters"] = sum(local_of(p).nbytes for p in own)
    state = (x for p in own for x in optimizer.state[p].values() if isinstance(x, torch.Tensor) and x.dim())
    sizes["optimizer"] = sum(local_of(x).nbytes for x in state)
    if save:
        job.save(folder)
    weights = {name: x.flatten().tolist() for name, x in job.weights().items()}
    return {"losses": seen, "bytes": sizes, "weights": weights}


def collectives(ctx: Any, text: str, numel: int) -> dict[str, Any]:
    """A sum over ranks, and the bytes that were counted for it."""
    from datetime import timedelta

    from unisono.comm.collectives import COLLECTIVES
    from unisono.comm.mesh import Mesh, Shape
    from unisono.observe.span import Recorder

    recorder, collective = Recorder(ctx.rank), COLLECTIVES.read(text)
    dp = Mesh(Shape(dp=ctx.world), ctx.rank, recorder, timedelta(seconds=60), collective=collective).dp
    x = torch.arange(numel, dtype=torch.float64) * (ctx.rank + 1)
    whole = dp.all_reduce(x.clone())
    dist.all_reduce(x)
    return {
        "off": float((whole - x).abs().max()),
        "sent": recorder.bytes()[("dp", "all_reduce")],
        "law": collective.sent("all_reduce", x.nbytes, ctx.world),
    }
