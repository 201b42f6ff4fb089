"""What ranks do in the tests of single properties; results are JSON."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import unisono
from tests.library.loops import Net, samples
from unisono.comm.group import Group
from unisono.library import Job
from unisono.spec.errors import UsageError


class Stream(IterableDataset):
    """Samples one after the other, collated by the loader into global batches."""

    def __iter__(self) -> Any:
        return iter(samples(20))


def parts(ctx: Any, plan: str) -> dict[str, Any]:
    """Which samples this rank sees of each global batch, from several kinds of source."""
    job = unisono.init(plan, context=ctx)
    ids = torch.arange(20)
    sources: dict[str, Any] = {
        "loader": DataLoader(TensorDataset(ids), batch_size=6),
        "shuffled": DataLoader(TensorDataset(ids), batch_size=6, shuffle=True),
        "dropped": DataLoader(TensorDataset(ids), batch_size=6, drop_last=True),
        "tensors": ids.split(6),
        "dicts": [{"ids": part, "names": [str(int(i)) for i in part], "kind": "x"} for part in ids.split(6)],
        "small": ids.split(1),
    }
    torch.manual_seed(ctx.rank)
    linear = nn.Linear(1, 1)
    _, _, *dealt = job.prepare(linear, torch.optim.SGD(linear.parameters(), 0.1), *sources.values())
    seen: dict[str, Any] = {}
    for name, data in zip(sources, dealt, strict=True):
        seen[name] = []
        for batch in data:
            own = (
                batch["ids"]
                if isinstance(batch, dict)
                else batch[0]
                if isinstance(batch, (list, tuple))
                else batch
            )
            if isinstance(batch, dict) and batch["names"] != [str(int(i)) for i in own]:
                raise ValueError("names and ids part ways")
            seen[name].append([own.tolist(), round(job._batch.ratio * 60)])
        if len(data) != len(sources[name]):
            raise ValueError("the length changed")
    stream = DataLoader(Stream(), batch_size=8)
    other = nn.Linear(1, 1)
    _, _, dealt_stream = job.prepare(other, torch.optim.SGD(other.parameters(), 0.1), stream)
    seen["stream"] = [len(x) for x, _ in dealt_stream]
    return seen


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8)
        )
        self.norm = nn.BatchNorm1d(8, momentum=None)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


def batch_norm(ctx: Any, plan: str | None) -> dict[str, Any]:
    """Parameters, running statistics and losses of a net whose samples meet."""
    torch.manual_seed(0)
    model = Pictures().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(26, 1, 6, 6, dtype=torch.float64), torch.randint(3, (26,))
    data: Any = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    job = None
    if plan is not None:
        job = unisono.init(plan, context=ctx)
        model, optimizer, data = job.prepare(model, optimizer, data)
    seen = []
    for _ in range(3):
        for a, b in data:
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            seen.append(job.mean(loss) if job is not None else loss.item())
            optimizer.step()
            optimizer.zero_grad()
    weights = job.weights() if job is not None else model.state_dict()
    return {"losses": seen, "weights": {k: v.double().flatten().tolist() for k, v in weights.items()}}


def noise(ctx: Any) -> dict[str, Any]:
    """What dropout leaves on this rank, and the script's own random numbers after it."""
    job = unisono.init("dp=2", context=ctx)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    inside = [model(torch.ones(1, 4)) != 0 for _ in range(8)]
    model.eval()
    quiet = model(torch.ones(1, 4))
    return {"inside": torch.cat(inside).tolist(), "outside": torch.rand(3).tolist(), "quiet": quiet.tolist()}


def helpers(ctx: Any, folder: str) -> dict[str, Any]:
    """mean, weigh, clip by torch, log and notes."""
    job = unisono.init("dp=2", context=ctx)
    model = Net(unused=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, data = job.prepare(model, optimizer, [torch.arange(5.0, dtype=torch.float64)])
    (x,) = data
    for own in data:
        means = [job.mean(own.mean()), job.mean(1.0)]
        job.weigh([30, 10][ctx.rank])
        weighed = job.mean([1.0, 5.0][ctx.rank])
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        logged = job.log(folder, loss=torch.tensor(float(ctx.rank)))
    F.cross_entropy(
        model(torch.ones(2, 6, dtype=torch.float64) * (ctx.rank + 1)), torch.tensor([0, 1])
    ).backward()
    norms = [float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)), job.clip(1e9)]
    for lines in job._lines.values():  # a process's end does it for a script
        lines.close()
    return {"own": x.tolist(), "means": means, "weighed": weighed, "logged": logged, "said": said.getvalue(),
            "notes": list(job.notes), "norms": norms}  # fmt: skip


def bytes_sent(ctx: Any) -> dict[str, Any]:
    """Bytes of gradients for two backwards and a step, with and without an exchange after the first."""
    job = unisono.init("dp=2", context=ctx)
    found = {}
    for name in ("each", "once", "late"):
        model = Net(width=64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.prepare(model, optimizer)
        before = job.mesh.recorder.bytes().get(("dp", "all_reduce"), 0)
        for number in range(2):
            with (
                job.accumulate()
                if name == "late" or (name == "once" and number == 0)
                else contextlib.nullcontext()
            ):
                model(torch.ones(2, 6) * (number + ctx.rank)).sum().backward()
        optimizer.step()
        found[name] = job.mesh.recorder.bytes()[("dp", "all_reduce")] - before
        found[f"{name} weights"] = [p.sum().item() for p in model.parameters()]
    return found


class Branch(nn.Module):
    """A weight that every call uses, and one that only some do. width: of the samples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always = nn.Linear(width, 1, bias=False)
        self.sometimes = nn.Linear(width, 1, bias=False)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.always(x) + self.sometimes(x) if both else self.always(x)


def two_models(ctx: Any) -> dict[str, Any]:
    """Gradients of two models after one backward through both, in which the last rank leaves out a weight of the one
    that is ready first elsewhere; and the sums that each group was asked for, in this rank's order."""
    asked: dict[int, list[int]] = {}
    start = Group.start_all_reduce

    def noted(group: Group, x: torch.Tensor) -> Any:
        asked.setdefault(id(group), []).append(x.numel())
        return start(group, x)

    Group.start_all_reduce = noted  # type: ignore[method-assign]
    job = unisono.init("dp=2", context=ctx)
    first, second = Branch(3), Branch(5)
    for model in (first, second):
        job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    here = float(ctx.rank + 1)
    (first(torch.full((1, 3), here), True) + second(torch.full((1, 5), here), ctx.rank == 0)).backward()
    grads = [p.grad.tolist() for model in (first, second) for p in model.parameters() if p.grad is not None]
    return {"asked": sorted(asked.values()), "grads": grads}


def tied(ctx: Any) -> dict[str, Any]:
    """The names of the weights of a model that uses one weight twice, and whether one device can load them."""
    job = unisono.init("shard=2", context=ctx)

    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        net[2].weight = net[0].weight
        return net

    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    job.prepare(model, optimizer, blocks=[])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    single = make()
    single.load_state_dict(job.weights())
    return {"names": sorted(job.weights()), "sums": [p.sum().item() for p in single.parameters()]}


def refused(ctx: Any) -> dict[str, str]:
    """code and remedy of each thing that cannot be prepared."""
    job = unisono.init("dp=2", context=ctx)
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    loader = DataLoader(samples(8), batch_size=4)
    sparse = nn.Embedding(3, 2, sparse=True)
    numbers = torch.utils.data.DistributedSampler(samples(8), num_replicas=2, rank=ctx.rank)
    tries: dict[str, Any] = {
        "order": lambda: job.prepare(sgd, net, loader),  # type: ignore[arg-type]
        "strangers": lambda: job.prepare(other, sgd, loader),
        "meta": lambda: job.prepare(nn.Linear(2, 2, device="meta"), sgd),
        "sparse": lambda: job.prepare(sparse, torch.optim.SGD(sparse.parameters(), 0.1)),
        "clip before prepare": lambda: job.clip(1.0),
        "data set": lambda: _fresh(job, samples(8)),
        "split already": lambda: _fresh(job, DataLoader(samples(8), batch_size=4, sampler=numbers)),
        "not iterable": lambda: _fresh(job, 5),
        "no tensors": lambda: list(_fresh(job, [["a", "b"]])),
        "other data": lambda: list(_fresh(job, [torch.ones(4) * ctx.rank])),
        "twice": lambda: [job.prepare(net, sgd), job.prepare(net, sgd)],
        "late parameter": lambda: _grown(job),
    }
    return {name: _said(attempt) for name, attempt in tries.items()}


def _said(attempt: Any) -> str:
    try:
        attempt()
    except UsageError as error:
        return error.code if error.fix else f"{error.code} without a remedy"
    return ""


def _fresh(job: Job, data: Any) -> Any:
    net = nn.Linear(2, 2)
    return job.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data)[2]


def _grown(job: Job) -> None:
    """A layer that comes after prepare: its gradient meets no other rank's."""
    net = nn.Sequential(nn.Linear(2, 2))
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    job.prepare(net, sgd)
    net.append(nn.Linear(2, 2))
    sgd.add_param_group({"params": net[1].parameters()})
    net(torch.ones(1, 2)).sum().backward()
    sgd.step()


def saved(
    ctx: Any, folder: str, plan: str, first: int, last: int, load: bool = False, optimizer: str = "adamw"
) -> dict[str, Any]:
    """Epochs first .. last-1, from a checkpoint if `load`, with one saved after each; losses and weights."""
    job = unisono.init(plan, context=ctx)
    torch.manual_seed(0)
    model = Net().double()
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer]
    opt: Any = make(model.parameters(), lr=1e-2, **({"momentum": 0.9} if optimizer == "sgd" else {}))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
    data: Any = DataLoader(samples(30), batch_size=8, shuffle=True)
    model, opt, data = job.prepare(model, opt, data)
    state = job.load(folder) if load else None
    if state is not None:
        schedule.load_state_dict(state["schedule"])
        if state["epoch"] != first:
            raise ValueError("another epoch")
    elif load:
        raise ValueError("nothing was there")
    seen = []
    for epoch in range(first, last):
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            seen.append(job.mean(loss))
            opt.step()
            schedule.step()
            opt.zero_grad()
        job.save(Path(folder), {"epoch": epoch + 1, "schedule": schedule.state_dict()})
    weights = {name: value.flatten().tolist() for name, value in job.weights().items()}
    return {"losses": seen, "weights": weights, "step": job.step, "lr": opt.param_groups[0]["lr"]}


def nothing_saved(ctx: Any, folder: str) -> dict[str, Any]:
    job = unisono.init("dp=2", context=ctx)
    model = Net()
    job.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    return {"state": job.load(folder)}


def script(ctx: Any, text: str) -> dict[str, Any]:
    """Run a script as it is and return its `losses`; the process group stands for torchrun."""
    torch.set_default_dtype(torch.float64)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "script.py", "exec"), space)
    return {"losses": space["losses"]}
