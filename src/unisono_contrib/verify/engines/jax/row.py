"""A row of the pipeline in JAX: a mesh of dp, shard and tp, and the compiled functions of its stages.

A backward computes its stage's forward again, from the input that it kept. Gradients stay apart until the step's end
on the axes whose devices see different samples, and meet once: by a sum, or for zero=2 by a sum of which each keeps a
part. Under zero=3 weights are gathered where they are used, and their gradients are scattered there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import numpy as np
from jax import lax  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh, NamedSharding  # pyright: ignore[reportMissingImports]
from jax.sharding import PartitionSpec as P  # pyright: ignore[reportMissingImports]

from unisono_contrib.verify.engines.jax.net import JaxSizes, StagePart

AXES = ("dp", "shard", "tp")
DATA = ("dp", "shard")
BATCH = P(DATA)
STREAM = P(DATA, "tp")  # what passes between stages, [B, T, D]

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class WeightDeal:
    """Which part of a weight lies on which device. whole: under zero=1 and zero=2 no weight is cut by shard."""

    sizes: JaxSizes
    shard: int
    zero: int

    def held(self, name: str, shape: tuple[int, ...]) -> P:
        """Of a weight during the step."""
        return self._spec(name, shape, self.zero == 3)

    def reduced(self, name: str, shape: tuple[int, ...]) -> P:
        """Of its gradient after the step."""
        return self._spec(name, shape, self.zero >= 2)

    def gathers(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether its rows lie on several devices of shard during the step."""
        return self.zero == 3 and self._divides(name, shape)

    def scatters(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether each device of shard keeps some rows of its gradient."""
        return self.zero == 2 and self._divides(name, shape)

    def _divides(self, name: str, shape: tuple[int, ...]) -> bool:
        rows = self.sizes.tp if self.sizes.cut_dim(name) == 0 else 1
        return shape[0] % (rows * self.shard) == 0

    def _spec(self, name: str, shape: tuple[int, ...], cut: bool) -> P:
        axes: list[Any] = [()] * len(shape)
        if (dim := self.sizes.cut_dim(name)) is not None:
            axes[dim] = ("tp",)
        if cut and self._divides(name, shape):
            axes[0] = (*axes[0], "shard")
        return P(*axes)


@dataclass(frozen=True)
class StageCode:
    """One stage, compiled for one mesh. weight: of one target's loss. shapes: of its weights."""

    part: StagePart
    deal: WeightDeal
    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    weight: float

    @property
    def _lead(self) -> dict[str, tuple[str, ...]]:
        """Of each gradient the axes on which its parts still lie apart during a step."""
        return {n: ("dp",) if self.deal.gathers(n, s) else DATA for n, s in self.shapes.items()}

    @cached_property
    def _specs(self) -> dict[str, P]:
        return {name: self.deal.held(name, shape) for name, shape in self.shapes.items()}

    def put(self, weights: Mapping[str, Any]) -> Arrays:
        """Its weights on its mesh."""
        return {name: put(weights[name], self.mesh, spec) for name, spec in self._specs.items()}

    def _mapped(self, function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Any:
        return jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs))

    def _run(self, w: Arrays, x: Any, targets: Any, turns: Any) -> Any:
        """On one device: what goes to the next stage, or the loss of its samples."""
        w = {
            name: lax.all_gather(x, "shard", axis=0, tiled=True)
            if self.deal.gathers(name, self.shapes[name])
            else x
            for name, x in w.items()
        }
        y = self.part.forward(w, x, turns)
        return self.part.loss(w, y, targets, self.weight) if self.part.last else y

    @cached_property
    def _inputs(self) -> tuple[Any, ...]:
        return self._specs, BATCH if self.part.first else STREAM, BATCH, (P(), P())

    @cached_property
    def forward(self) -> Any:
        """(weights, x, targets, turns) → the next stage's x, or [devices of dp and shard], each one's loss."""

        def run(w: Arrays, x: Any, targets: Any, turns: Any) -> Any:
            y = self._run(w, x, targets, turns)
            return y[None] if self.part.last else y

        return self._mapped(run, self._inputs, BATCH if self.part.last else STREAM)

    def _pull(self, inward: bool, weights: bool) -> Any:
        """(weights, x, targets, turns, gradient of what `forward` made; 1 for a loss) → of x, of the weights."""
        lead = self._lead

        def run(w: Arrays, x: Any, targets: Any, turns: Any, g: Any) -> Any:
            apart = {name: lax.pcast(v, lead[name], to="varying") for name, v in w.items()}
            of_w: Callable[[Arrays], Any] = lambda w: self._run(w, x, targets, turns)
            of_x: Callable[[Any], Any] = lambda x: self._run(apart, x, targets, turns)
            if inward and weights:
                _, back = jax.vjp(lambda w, x: self._run(w, x, targets, turns), apart, x)
                dw, dx = back(g)
            elif inward:
                (dx,), dw = jax.vjp(of_x, x)[1](g), {}
            else:
                (dw,), dx = jax.vjp(of_w, apart)[1](g), None
            return dx, {name: v[None] for name, v in dw.items()}

        grads = {name: P(lead[name], *spec) for name, spec in self._specs.items()} if weights else {}
        out = P() if self.part.last else STREAM

        def begin(w: Arrays, x: Any, targets: Any, turns: Any, g: Any) -> Any:
            return run(w, x, targets, turns, lax.pcast(g, DATA, to="varying") if self.part.last else g)

        return self._mapped(begin, (*self._inputs, out), (STREAM if inward else None, grads))

    @cached_property
    def backward(self) -> Any:
        """All of it."""
        return self._pull(inward=not self.part.first, weights=True)

    @cached_property
    def inward(self) -> Any:
        """Towards the input alone."""
        return self._pull(inward=True, weights=False)

    @cached_property
    def weights(self) -> Any:
        """Towards the weights alone."""
        return self._pull(inward=False, weights=True)

    @cached_property
    def meet(self) -> Any:
        """Gradients whose parts lie apart → their sums, as the step leaves them."""
        lead = self._lead

        def run(grads: Arrays) -> Arrays:
            out = {}
            for name, g in grads.items():
                if self.deal.scatters(name, self.shapes[name]):
                    part = lax.psum_scatter(g[0], "shard", scatter_dimension=0, tiled=True)
                    out[name] = lax.psum(part, "dp")
                else:
                    out[name] = lax.psum(g[0], lead[name])
            return out

        before = {name: P(lead[name], *spec) for name, spec in self._specs.items()}
        after = {name: self.deal.reduced(name, shape) for name, shape in self.shapes.items()}
        return self._mapped(run, (before,), after)


def put(x: Any, mesh: Mesh, spec: P) -> jax.Array:
    """A whole array, dealt to a mesh, of which this process may hold a part."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at: x[at])


def whole(x: jax.Array) -> np.ndarray[Any, Any]:
    """All of an array that is dealt to a mesh, on each process of it."""
    mesh = x.sharding.mesh  # type: ignore[attr-defined]
    alike = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(x)
    return np.asarray(alike.addressable_data(0))
