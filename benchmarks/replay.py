"""Gradients of a GPT, replayed: what a rank of `slow_links` plays, whose backward waits instead of computing.

Parameters become ready in the order and at the times at which a real backward of the seeded model finished them, drawn
out to the length that is asked for. So collectives meet backward as they would on a device that is as fast as that.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lab
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unisono.codecs import CODECS
from unisono.comm.group import Group
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.context import RankContext
from unisono.observe.span import Recorder
from unisono.parallel.params import Slot
from unisono.spec.errors import UnisonoError
from unisono.sync.every_step import EveryStep
from unisono.train.build.build import connect, initial_values, model_of, place_of
from unisono.train.data.load import load
from unisono.train.step.gradients import Gradients
from unisono_contrib.measure.hooks import hook_of
from unisono_contrib.measure.turns import agreed
from unisono_contrib.sync._choice import choosing

SIZES = {"3M": (4, 4, 256), "13M": (7, 6, 384)}  # blocks, heads, width
CONTEXT, BATCH, SEED = 128, 2, 0
DDP = "DDP fp32"
FORWARD = 1 / 3  # of a step's computation
_DEVICE_TABLE = "/proc/self/net/dev"


@dataclass(frozen=True)
class Recorded:
    """One backward of a model. ready: by parameter, the share of it that is over when this gradient is there."""

    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    gradients: Sequence[Tensor]
    ready: Sequence[float]

    @property
    def numel(self) -> int:
        return sum(x.numel() for x in self.gradients)


def recorded(size: str, rank: int) -> Recorded:
    """A backward of the seeded model over this rank's own samples."""
    n_layer, n_head, d_model = SIZES[size]
    recipe = Recipe(
        name="slow-links", seed=SEED,
        model=ModelConfig(n_layer=n_layer, n_head=n_head, d_model=d_model, context=CONTEXT),
        data=DataConfig(source="stdlib", tokenizer="byte"),
        train=TrainConfig(steps=1, global_batch=BATCH, micro_batch=BATCH),
    )  # fmt: skip
    recipe = resolve(recipe, "dp=1", 1).recipe
    model = model_of(recipe, load(recipe.data, recipe.model))
    model = model.to_empty(device="cpu") if any(p.is_meta for p in model.parameters()) else model
    values = initial_values(model, SEED, torch.device("cpu"))
    named = [(name, p) for name, p in model.named_parameters()]
    with torch.no_grad():
        for name, p in named:
            p.copy_(values(name))
    stamps: dict[int, float] = {}
    for _, p in named:
        p.register_post_accumulate_grad_hook(lambda q: stamps.__setitem__(id(q), time.perf_counter()))
    draw = torch.Generator().manual_seed(1000 + rank)
    for _ in range(2):  # the first one makes memory
        for _, p in named:
            p.grad = None
        tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1), generator=draw)
        x: Any = model.stem(tokens[:, :-1])  # type: ignore[operator]
        for block in model.blocks:  # type: ignore[union-attr]
            x = block(x)
        loss = nn.functional.cross_entropy(model.head(x).flatten(0, 1), tokens[:, 1:].flatten())  # type: ignore[operator]
        begun = time.perf_counter()
        loss.backward()
    length = max(stamps.values()) - begun
    used = [(name, p) for name, p in named if p.grad is not None]
    ready = [(stamps[id(p)] - begun) / length for _, p in used]
    gradients = [p.grad.clone() for _, p in used if p.grad is not None]
    return Recorded([name for name, _ in used], [tuple(p.shape) for _, p in used], gradients, ready)


class _Ready(torch.autograd.Function):
    """One parameter's place in the chain: in backward, waits for its moment and gives its recorded gradient."""

    @staticmethod
    def forward(ctx: Any, carry: Tensor, param: Tensor, replay: "Replay", at: int) -> Tensor:
        ctx.replay, ctx.at = replay, at
        return carry.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        replay: Replay = ctx.replay
        replay.wait_until(replay.recorded.ready[ctx.at])
        return grads[0], replay.recorded.gradients[ctx.at].clone(), None, None


class Replay(nn.Module):
    """A model whose step takes `seconds`, and whose gradients are the recorded ones. weights: shared by all replays,
    since nothing steps them."""

    def __init__(self, recorded: Recorded, weights: Sequence[Tensor], seconds: float) -> None:
        super().__init__()
        self.recorded, self.seconds, self._begun = recorded, seconds, 0.0
        self.held = nn.ParameterList([nn.Parameter(w) for w in weights])
        order = sorted(
            range(len(weights)), key=lambda at: -recorded.ready[at]
        )  # who is ready first comes last
        self._order = order

    def forward(self, carry: Tensor) -> Tensor:
        time.sleep(self.seconds * FORWARD)
        for at in self._order:
            carry = _Ready.apply(carry, self.held[at], self, at)  # type: ignore[assignment]
        return carry

    def backward(self, carry: Tensor) -> None:
        self._begun = time.perf_counter()
        carry.backward()
        self.wait_until(1.0)

    def wait_until(self, share: float) -> None:
        left = self._begun + share * self.seconds * (1 - FORWARD) - time.perf_counter()
        if left > 0:
            time.sleep(left)


@dataclass
class PeerWay:
    """DDP, with a hook of torch's or none."""

    replay: Replay
    ddp: DistributedDataParallel

    def step(self) -> None:
        carry = self.ddp(torch.zeros(1, requires_grad=True))
        self.replay.backward(carry)
        for p in self.replay.parameters():
            p.grad = None

    def sent(self) -> int | None:
        return None


@dataclass
class OwnWay:
    """What a step of ours does with gradients, through a codec."""

    replay: Replay
    group: Group
    gradients: Gradients
    steps: int = 0
    start: Tensor = field(default_factory=lambda: torch.zeros(1, requires_grad=True))

    def step(self) -> None:
        carry = self.replay(self.start)
        self.gradients.arm()
        self.replay.backward(carry)
        self.gradients.close()
        self.gradients.forget()
        self.gradients.sync.after_update(self.steps)
        self.steps += 1

    def sent(self) -> int | None:
        return sum(self.group.recorder.bytes().values())


def peer_way(name: str, replay: Replay) -> PeerWay:
    """Raises what DDP raises where it refuses a hook. Hooks get one bucket: PowerSGD's begins sums where others end,
    and on Gloo those of two buckets wait for each other for ever."""
    ddp = DistributedDataParallel(replay, bucket_cap_mb=None if name == DDP else 1 << 12)
    if name != DDP:
        ddp.register_comm_hook(*hook_of(name, dist.group.WORLD))  # type: ignore[arg-type]
    return PeerWay(replay, ddp)


def own_way(codec: str, replay: Replay, rank: int, world: int) -> OwnWay:
    """codec: perhaps with @BYTES, see `slow_links`. Raises UsageError for one that is not there."""
    name, _, cap = codec.partition("@")
    coder = CODECS.read(name).bind()
    coder.seed, coder.cap = SEED, int(cap) if cap else coder.cap
    group = Group("dp", range(world), rank, dist.group.WORLD, Recorder(rank))
    slots = [
        Slot(name, p, p, tuple(p.shape), (0,) * p.dim())
        for name, p in zip(replay.recorded.names, replay.held, strict=True)
    ]
    sync = choosing(EveryStep().bind(slots, group, coder), coder, slots, group)
    return OwnWay(replay, group, Gradients(slots, group, sync))


def main(ctx: RankContext, argument: dict[str, Any], shared: object = None) -> dict[str, Any]:
    """Of each rank: seconds, device bytes and payload of each way in each turn; which cannot be played, and why."""
    lab.enter(argument["doors"][ctx.rank])
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 600.0)
    connect(place, ctx.store)
    known = recorded(argument["size"], ctx.rank)
    if ctx.rank == 0:
        ctx.store.set("ready", json.dumps(list(known.ready)))
    known = Recorded(known.names, known.shapes, known.gradients, json.loads(ctx.store.get("ready")))
    least = 2 * (ctx.world - 1) / ctx.world * 4 * known.numel * 8 / argument["rate"]
    seconds = least / argument["intensity"]
    weights = [torch.zeros(shape) for shape in known.shapes]
    ways, refused = _ways(argument["ways"], known, weights, seconds, ctx)
    took = _turns(ways, argument["turns"], argument["seconds"])
    return {
        "took": took, "refused": refused, "compute": seconds, "numel": known.numel,
        "shapes": [list(shape) for shape in known.shapes], "load": os.getloadavg()[0],
    }  # fmt: skip


def _ways(
    names: Sequence[str], known: Recorded, weights: Sequence[Tensor], seconds: float, ctx: RankContext
) -> tuple[dict[str, PeerWay | OwnWay], dict[str, str]]:
    ways: dict[str, PeerWay | OwnWay] = {}
    refused: dict[str, str] = {}
    for name in names:
        replay = Replay(known, weights, seconds)
        try:
            is_peer = name == DDP or name.startswith("torch ")
            way = peer_way(name, replay) if is_peer else own_way(name, replay, ctx.rank, ctx.world)
            for _ in range(3):  # DDP deals its buckets anew, PowerSGD begins, connections are made
                way.step()
        except (UnisonoError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            refused[name] = str(error).splitlines()[0]
            continue
        ways[name] = way
    return ways, refused


def _turns(
    ways: dict[str, PeerWay | OwnWay], turns: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Each way once a turn, beginning elsewhere each time; ends alike on all ranks."""
    names, begun = list(ways), time.perf_counter()
    took: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "device": [], "payload": []} for name in names
    }
    for turn in range(turns):
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            way = ways[name]
            dist.barrier()
            carried, counted, start = device_bytes(), way.sent(), time.perf_counter()
            way.step()
            after = time.perf_counter() - start
            dist.barrier()  # what is under way for others has passed too
            took[name]["seconds"].append(after)
            took[name]["device"].append(float(device_bytes() - carried))
            took[name]["payload"].append(-1.0 if counted is None else float((way.sent() or 0) - counted))
        if turn >= 2 and agreed([time.perf_counter() - begun])[0] > seconds:
            break
    for seen in took.values():
        for key, values in seen.items():
            seen[key] = agreed(values)  # the slowest, and the busiest
    return took


def device_bytes() -> int:
    """Bytes that this host's device has sent."""
    for line in Path(_DEVICE_TABLE).read_text().splitlines():
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == "lab0":
            return int(numbers.split()[8])
    return 0
