"""A plan's timetable played in JAX: the same list of actions that torch's ranks play, each row on a mesh of its own.

One process plays all rows on devices of its own, or each process plays the row of its one device. Then a message is a
collective of its two ends, and all processes meet in one order: that in which the timetable's computations begin.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
from jax import lax  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh, NamedSharding  # pyright: ignore[reportMissingImports]
from jax.sharding import PartitionSpec as P  # pyright: ignore[reportMissingImports]

from unisono.programs.balance import balance
from unisono.programs.pipeline import COMPUTE, SENDS, Action, Timetable, play_costs, with_messages
from unisono_contrib.verify.engines.jax.net import JaxSizes, StagePart
from unisono_contrib.verify.engines.jax.row import (
    AXES,
    BATCH,
    STREAM,
    Arrays,
    StageCode,
    WeightDeal,
    put,
    whole,
)

Key = tuple[int, int]  # stage, micro-batch


def program(timetable: Timetable) -> Iterator[tuple[int, Action]]:
    """(row, computation or send) of all rows in one order that each row keeps."""
    for placed in play_costs(timetable):
        for action in with_messages(timetable, placed.action):
            if action.kind in COMPUTE or action.kind in SENDS:
                yield placed.row, action


def parts_of(
    sizes: JaxSizes, blocks: Sequence[int], weights: Mapping[str, np.ndarray[Any, Any]], stages: int
) -> list[StagePart]:
    """The model's stages: as many blocks in each as `blocks` says, or by equal matrices as torch's are."""
    costs = [
        float(sum(w.size for n, w in weights.items() if n.startswith(f"blocks.{i}.") and w.ndim == 2))
        for i in range(sizes.n_layer)
    ]
    if blocks:
        edges = np.cumsum([0, *blocks]).tolist()
        cut = [range(a, b) for a, b in pairwise(edges)]
    else:
        cut = balance(costs, 0.0, float(weights["stem.tok.weight"].size), stages)
    return [StagePart(sizes, each, i == 0, i == stages - 1) for i, each in enumerate(cut)]


@dataclass
class JaxPlayer:
    """All rows that this process plays. stages: of each row, by number; of other rows, which others play, nothing.
    rows: the mesh of each row. turns: cosines and sines, dealt, by stage. apart: a device is a process."""

    timetable: Timetable
    rows: Sequence[Mesh]
    stages: Mapping[int, StageCode]
    turns: Mapping[int, tuple[Any, Any]]
    apart: bool
    program: Sequence[tuple[int, Action]] = ()
    # Inputs and targets of stages until their backward.
    kept: dict[Key, tuple[Any, Any]] = field(default_factory=dict)
    inbox: dict[tuple[str, int, int], Any] = field(default_factory=dict)
    grads: dict[int, Arrays] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)

    def step(
        self, weights: Mapping[int, Arrays], micros: Sequence[tuple[Any, Any]]
    ) -> tuple[list[Any], dict[int, Arrays]]:
        """Losses and gradients by stage, still on their devices. weights: dealt, by stage. micros: tokens and targets
        [B, T] of each micro-batch, over all replicas."""
        self.kept, self.inbox, self.grads, self.losses = {}, {}, {}, []
        for row, action in self.program:
            stage = self.stages.get(action.stage)
            if action.kind in SENDS:
                self._send(row, action, micros)
            elif stage is not None:
                self._compute(action, stage, weights[action.stage], micros[action.micro])
        return self.losses, {n: self.stages[n].meet(grads) for n, grads in self.grads.items()}

    def _compute(self, action: Action, stage: StageCode, w: Arrays, micro: tuple[Any, Any]) -> None:
        key, dx, turns = (action.stage, action.micro), None, self.turns[action.stage]
        if action.kind == "F":
            tokens, targets = (put(x, stage.mesh, BATCH) for x in micro)
            x = tokens if stage.part.first else self.inbox.pop(("F", *key))
            self.kept[key] = x, targets
            y = stage.forward(w, x, targets, turns)
            if stage.part.last:
                self.losses.append(y)
            else:
                self.inbox["F", action.stage + 1, action.micro] = y
            return
        split = self.timetable.splits_backward
        g = put(np.ones(()), stage.mesh, P()) if stage.part.last else self.inbox["B", *key]
        operands = (w, *self.kept[key], turns, g)
        if action.kind == "W":
            self._add(action.stage, stage.weights(*operands)[1])
        elif not split:
            dx, grads = stage.backward(*operands)
            self._add(action.stage, grads)
        elif not stage.part.first:
            dx, _ = stage.inward(*operands)
        if action.kind == "B" and not stage.part.first:
            self.inbox["B", action.stage - 1, action.micro] = dx
        if action.kind == "W" or not split:
            del self.kept[key]
            if not stage.part.last:
                del self.inbox["B", *key]

    def _add(self, stage: int, grads: Arrays) -> None:
        old = self.grads.get(stage)
        self.grads[stage] = grads if old is None else _sums(old, grads)

    def _send(self, row: int, action: Action, micros: Sequence[tuple[Any, Any]]) -> None:
        """Hand what a computation made to the other row; the receiver takes part where it is another process."""
        kind, side = ("F", 1) if action.kind == "SEND_F" else ("B", -1)
        key = (kind, action.stage + side, action.micro)
        if not self.apart:
            self.inbox[key] = jax.device_put(self.inbox[key], NamedSharding(self.rows[action.peer], STREAM))
            return
        mine = {self.timetable.placement[stage] for stage in self.stages}
        if mine & {row, action.peer}:
            B, T = micros[action.micro][0].shape
            width = next(iter(self.stages.values())).part.sizes.d_model
            x = self.inbox.pop(key) if row in mine else None
            y = _passed(x, self.rows[row], self.rows[action.peer], (B, T, width))
            if y is not None:
                self.inbox[key] = y


@jax.jit
def _sums(a: Arrays, b: Arrays) -> Arrays:
    return jax.tree.map(jnp.add, a, b)


@cache
def _passing(source: Mesh, target: Mesh) -> tuple[Mesh, Any]:
    """The mesh of two rows, and what moves an array from the first to the second."""
    pair = Mesh(np.stack((source.devices, target.devices)), ("row", *AXES))
    spec = P("row", *STREAM)
    move = jax.shard_map(
        lambda x: lax.ppermute(x, "row", [(0, 1)]), mesh=pair, in_specs=(spec,), out_specs=spec
    )
    return pair, jax.jit(move)


def _passed(x: Any, source: Mesh, target: Mesh, shape: tuple[int, ...]) -> Any:
    """The array on the target's devices; None on those of the source. x: None on the target's."""
    pair, move = _passing(source, target)
    there, whole_pair = NamedSharding(target, STREAM), NamedSharding(pair, P("row", *STREAM))
    local = jnp.zeros(there.shard_shape(shape)) if x is None else x.addressable_data(0)
    both = jax.make_array_from_single_device_arrays((2, *shape), whole_pair, [local[None]])
    moved = move(both).addressable_data(0)
    return jax.make_array_from_single_device_arrays(shape, there, [moved[0]]) if x is None else None


def player_of(
    timetable: Timetable, devices: Sequence[Any], shape: tuple[int, int, int], zero: int, sizes: JaxSizes,
    blocks: Sequence[int], weights: Mapping[str, Any], turns: tuple[Any, Any], targets: int, apart: bool,
) -> JaxPlayer:  # fmt: skip
    """The player of this process. devices: of all rows, outer to inner pp, dp, shard, tp. targets: of a global
    batch."""
    rows = [
        Mesh(np.array(each).reshape(shape), AXES)
        for each in np.array(devices).reshape(len(timetable.rows), -1)
    ]
    parts = parts_of(sizes, blocks, weights, timetable.length)
    deal, here = WeightDeal(sizes, shape[1], zero), jax.process_index()
    stages = {}
    for stage, row in enumerate(timetable.placement):
        if any(device.process_index == here for device in rows[row].devices.flat):
            part = parts[stage % timetable.length]
            shapes = {name: weights[name].shape for name in part.names(list(weights))}
            stages[stage] = StageCode(part, deal, rows[row], shapes, 1.0 / targets)
    dealt = {
        n: (put(turns[0], stage.mesh, P()), put(turns[1], stage.mesh, P())) for n, stage in stages.items()
    }
    return JaxPlayer(timetable, rows, stages, dealt, apart, list(program(timetable)))


def step_of(
    player: JaxPlayer, weights: Mapping[str, Any], micros: Sequence[tuple[Any, Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """`loss` and `raw/NAME` of one step, whole, as far as this process has them; those of several add up."""
    dealt = {number: stage.put(weights) for number, stage in player.stages.items()}
    losses, grads = player.step(dealt, micros)
    out = {"loss": np.array([sum(float(whole(x).sum()) for x in losses)])}
    for of_stage in grads.values():
        for name, g in of_stage.items():
            key, value = f"raw/{name}", whole(g)
            out[key] = out[key] + value if key in out else value
    return out
