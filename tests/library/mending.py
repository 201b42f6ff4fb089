"""Loops for what stands around a step: precision, own data, averages, compiled models, what is kept. Run in ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import unisono
from tests.library.loops import Net, samples
from unisono.library import Job


def weights_of(job: Job) -> dict[str, list[float]]:
    return {name: x.flatten().tolist() for name, x in job.weights().items()}


def mixed(ctx: Any, plan: str, dtype: str, scale: float) -> dict[str, Any]:
    """Autocast and a scaler."""
    torch.manual_seed(3)
    job = unisono.init(plan, context=ctx)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [(x.float(), y) for x, y in (samples(48)[i : i + 12] for i in range(0, 48, 12))]
    model, optimizer, data = job.prepare(model, optimizer, data)
    scaler = job.scaler(init_scale=scale, growth_interval=1000, enabled=dtype == "fp16")
    seen, scales = [], []
    for _ in range(4):
        for x, y in data:
            with job.autocast(dtype):
                loss = F.cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(job.mean(loss))
            scales.append(scaler.get_scale())
    return {"losses": seen, "scales": scales, "weights": weights_of(job)}


def overflow(ctx: Any, plan: str) -> dict[str, Any]:
    """One entry of one gradient is infinite: one rank's shard has it."""
    torch.manual_seed(3)
    job = unisono.init(plan, context=ctx)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.prepare(model, optimizer)
    before = weights_of(job)
    scaler = job.scaler(init_scale=4.0)
    out = model(torch.ones(4, 6, dtype=torch.float64))
    scaler.scale(out.sum()).backward()
    grad = model.stem.weight.grad
    local = grad.to_local() if hasattr(grad, "to_local") else grad
    if job.rank == 0 or not hasattr(grad, "to_local"):
        local[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return {"same": weights_of(job) == before, "scale": scaler.get_scale()}


PARTS = ((12, 12, 5), (7, 9), (3, 4, 4, 2))  # samples of each batch, of each rank


def parts_of(count: int) -> list[list[Any]]:
    """Batches of each rank's own."""
    x, y = samples(sum(map(sum, PARTS))).tensors
    rows = iter(
        zip(x.split([n for part in PARTS for n in part]), y.split([n for part in PARTS for n in part]))
    )
    return [[next(rows) for _ in part] for part in PARTS][:count]


def joined(ctx: Any, plan: str, parts: int) -> dict[str, Any]:
    torch.manual_seed(3)
    job = unisono.init(plan, context=ctx)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.prepare(model, optimizer)
    seen, rows = [], []
    for _ in range(2):
        for x, y in job.join(parts_of(parts)[job.rank]):
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(job.mean(loss))
            rows.append([job.gather(y).tolist(), job.gather([int(i) for i in y])])
    return {"losses": seen, "rows": rows, "weights": weights_of(job)}


def joined_alone(ctx: Any, parts: int) -> dict[str, Any]:
    """One device on what the ranks have for each step."""
    torch.manual_seed(3)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen, rows = [], []
    for _ in range(2):
        for step in range(max(map(len, parts_of(parts)))):
            own = [part[step] for part in parts_of(parts) if step < len(part)]
            x, y = (torch.cat(each) for each in zip(*own, strict=True))
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
            rows.append([y.tolist(), y.tolist()])
    weights = {name: x.flatten().tolist() for name, x in model.state_dict().items()}
    return {"losses": seen, "rows": rows, "weights": weights}


def clipped(ctx: Any, plan: str) -> dict[str, Any]:
    """By value, under accumulation."""
    torch.manual_seed(3)
    job = unisono.init(plan, context=ctx)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = [samples(18)[i : i + 6] for i in range(0, 18, 6)]
    model, optimizer, data = job.prepare(model, optimizer, data)
    for x, y in data:
        with job.accumulate():
            F.cross_entropy(model(x), y).backward()
    job.clip_value(0.01)
    optimizer.step()
    return {"weights": weights_of(job)}


class Epochs:
    """Something of the user's that has a state."""

    def __init__(self) -> None:
        self.done: dict[Any, Any] = {}

    def state_dict(self) -> dict[Any, Any]:
        return self.done

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.done = state


def kept(ctx: Any, plan: str, folder: str, stop: int | None) -> dict[str, Any]:
    """A schedule, a scaler, an average of weights and a thing of the user's own go on with the rest."""
    torch.manual_seed(3)
    job = unisono.init(plan, context=ctx)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(samples(40), batch_size=8, shuffle=True)
    model, optimizer, data = job.prepare(model, optimizer, data)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    scaler, mine = job.scaler(init_scale=8.0, growth_interval=3), Epochs()
    job.keep(schedule=schedule, scaler=scaler, average=average, mine=mine)
    state = job.load(folder) or {"epoch": 0}
    for epoch in range(state["epoch"], 2):
        for x, y in data:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            average.update_parameters(model)
            mine.done[epoch, "last"] = job.step
            if job.step == stop:
                job.save(folder, {"epoch": epoch})
                return {}
    from unisono.library.sharding import whole_model

    ema = {name: x.double().flatten().tolist() for name, x in whole_model(average).items()}
    return {"weights": weights_of(job) | ema, "lr": schedule.get_last_lr(), "scale": scaler.get_scale(),
            "mine": [[list(key), value] for key, value in mine.done.items()]}  # fmt: skip


def compiled(ctx: Any, plan: str | None, order: str) -> dict[str, Any]:
    """order: whether the model is compiled before `prepare`, after it, in place, or not at all."""
    torch.manual_seed(3)
    job = unisono.init(plan, context=ctx) if plan else unisono.init(context=ctx)
    model: Any = Net().double()
    if order == "before":
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [samples(24)[i : i + 8] for i in range(0, 24, 8)]
    model, optimizer, data = job.prepare(model, optimizer, data)
    if order == "in place":
        model.compile(backend="aot_eager")
    called = torch.compile(model, backend="aot_eager") if order == "after" else model
    seen = []
    for _ in range(2):
        for x, y in data:
            loss = F.cross_entropy(called(x), y)
            loss.backward()
            job.clip(0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(job.mean(loss))
    weights = {name.removeprefix("_orig_mod."): x for name, x in weights_of(job).items()}
    names = [name for name in job.weights() if "_orig_mod" in name]
    return {"losses": seen, "weights": weights, "odd": names, "notes": [note[:5] for note in job.notes]}


def talk(ctx: Any, folder: str) -> dict[str, Any]:
    """What ranks tell each other."""
    import contextlib
    import io
    from pathlib import Path

    import numpy as np

    job = unisono.init("dp=-1", context=ctx)
    ranks, r = job.ranks, job.rank
    tree = {"x": torch.arange(3) * r, 5: [1.5, None, "ä"], "n": np.eye(2) * r, "t": (True, torch.zeros(0, 2)),
            "p": Path("a") / str(r), "b": torch.tensor(1.25, dtype=torch.bfloat16)}  # fmt: skip
    got = ranks.broadcast(tree, 1)
    same = (got["x"].tolist(), got[5], got["n"].tolist(), got["t"][1].shape, got["p"], float(got["b"]))
    want = ([0, 1, 2], [1.5, None, "ä"], [[1.0, 0.0], [0.0, 1.0]], (0, 2), Path("a/1"), 1.25)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ranks.print("once") if r == 0 else ranks.print("never")
    made = Path(folder) / "made"
    with ranks.main_first() as first:
        if first:
            made.write_text("x")
        seen = made.exists()
    code = ""
    try:
        ranks.gather(object())
    except unisono.UnisonoError as error:
        code = error.code
    return {
        "broadcast": same == want and isinstance(got["t"], tuple),
        "each": [len(part) for part in ranks.gather("a" * r)],
        "sums": [ranks.sum(r + 1), ranks.max(0.5 * r), ranks.min(r), ranks.sum(torch.ones(2) * r).tolist()],
        "flags": [ranks.any(r == 1), ranks.all(r == 1)],
        "said": said.getvalue(), "seen": seen, "code": code,
    }  # fmt: skip
