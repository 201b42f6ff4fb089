"""A small model, samplers of it that have a bug, and what ranks and samplers of these tests do."""

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.launch.context import RankContext
from unisono.launch.run.membership import Role
from unisono.spec.beside import BesideRanks
from unisono.spec.errors import UnisonoError
from unisono_contrib.train.samplers.pool import SamplerPool
from unisono_contrib.train.samplers.process import serve
from unisono_contrib.train.samplers.weights import WeightHolder, probe_of

TIES = (("out.weight", "tok.weight"),)


class TiedModel(nn.Module):
    """Tokens [n, t] → logits [n, t, 16]; its square layer can be transposed without anybody noticing by shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(16, 8)
        self.square = nn.Linear(8, 8)
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.square(self.tok(tokens)).tanh())


def model(seed: int = 0) -> TiedModel:
    torch.manual_seed(seed)
    return TiedModel()


def weights_of(version: int) -> dict[str, Tensor]:
    """Whole weights, owners of ties alone; other ones in each version."""
    made = model(version)
    return {name: p.detach().clone() for name, p in made.named_parameters()}


def echo(compute: Any, said: Mapping[str, Any], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """A sample is the model's logits of what was sent."""
    with torch.no_grad():
        return [compute(tensors[0])]


class KeepsOld(WeightHolder):
    """verl#7495: weights arrive, and the model goes on with those that it began with."""

    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self.version = version


class MissesOne(WeightHolder):
    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        super().put(version, {name: x for name, x in weights.items() if name != "square.bias"})


class MissesTie(WeightHolder):
    """The output layer has a copy of its own, made before the weights came."""

    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        if version == 0:
            self.model.out.weight = nn.Parameter(self.model.out.weight.detach().clone())  # type: ignore[union-attr]
        super().put(version, weights)


class Transposes(WeightHolder):
    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        super().put(version, {n: x.T if n == "square.weight" else x for n, x in weights.items()})


class RoundsDtype(WeightHolder):
    """Weights pass through bf16 on their way."""

    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        super().put(version, {name: x.bfloat16().float() for name, x in weights.items()})


class HoldsHalf(WeightHolder):
    """The model computes in bf16."""

    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self.model.bfloat16()
        super().put(version, weights)


class Unapplied(WeightHolder):
    """Weights are acknowledged by what the model holds, and samples are drawn by a copy from before."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        before = model(99)
        self.compute = lambda tokens: before(tokens)


class SaysOldVersion(WeightHolder):
    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        super().put(max(0, version - 1), weights)


class FrozenAfter(WeightHolder):
    """Two versions are taken; later ones are not."""

    def put(self, version: int, weights: Mapping[str, Tensor]) -> None:
        if version < 2:
            super().put(version, weights)
        self.version = version


HOLDERS = {kind.__name__: kind for kind in (
    WeightHolder, KeepsOld, MissesOne, MissesTie, Transposes, RoundsDtype, HoldsHalf, Unapplied, SaysOldVersion,
    FrozenAfter,
)}  # fmt: skip


def beside(ctx: RankContext) -> BesideRanks:
    return BesideRanks(ctx.store.across(), ctx.run_token, lambda text: ctx.channel.send("note", text=text))


def play(ctx: RankContext, holder: str = "WeightHolder", bound: int = 0, steps: int = 3) -> dict[str, Any]:
    """A sampler serves; a trainer sends `steps` versions, and has samples drawn of each step."""
    if ctx.role is Role.SAMPLER:
        return serve(ctx, HOLDERS[holder](model(50), TIES), echo)
    if ctx.rank:
        return {}
    samplers, mine = 2, WeightHolder(model(51), TIES)
    pool, versions, equal = (
        SamplerPool(beside(ctx), samplers, bound, mine, patience=20.0),
        list[int](),
        list[bool](),
    )
    try:
        asked = 0
        for step in range(steps):
            pool.publish(step, weights_of(step))
            if not bound:
                pool.settle()
            while asked <= min(step + bound, steps - 1):
                pool.ask(asked, [({}, [probe_of(mine.model)])] * 3)
                asked += 1
            for drawn in pool.collect(step):
                versions.append(drawn.version)
                wanted = WeightHolder(model(52), TIES)
                wanted.put(drawn.version, weights_of(drawn.version))
                equal.append(
                    torch.equal(drawn.tensors[0], echo(wanted.compute, {}, [probe_of(mine.model)])[0])
                )
    except UnisonoError as error:
        facts = {"version": getattr(error, "version", None), "tensors": getattr(error, "tensors", ())}
        return {"code": error.code, "text": error.render(), "step": step, **facts}
    finally:
        pool.close()
    return {"versions": versions, "equal": equal}


def lose(ctx: RankContext, how: str, losses: int = 1) -> dict[str, Any]:
    """A trainer and a sampler, of which something becomes in the middle of its request."""
    if ctx.role is Role.SAMPLER:
        holder = WeightHolder(model(50), TIES)
        if how == "never":
            raise ValueError("no model for this sampler")
        return serve(ctx, holder, lambda *request: _dying(ctx, how, losses, *request))
    pool = SamplerPool(beside(ctx), 1, 0, WeightHolder(model(51), TIES), 3.0, 2.5)
    drawn = list[int]()
    for step in range(3):
        pool.publish(step, weights_of(step))
        pool.ask(step, [({}, [torch.arange(4)[None]])] * 2)
        drawn += [each.version for each in pool.collect(step)]
    return {"versions": drawn, "births": ctx.store.across().add("sampler/0/births", 0)}


def _dying(
    ctx: RankContext, how: str, losses: int, compute: Any, said: Any, tensors: Sequence[Tensor]
) -> Any:
    number = ctx.store.across().add("requests", 1)
    if 3 <= number < 3 + losses:
        if how == "raises":
            raise ValueError("a reward that does not parse")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
    return echo(compute, said, tensors)
