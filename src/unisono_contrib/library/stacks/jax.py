"""JAX: gradients over a mesh of CPU devices beside those of one. options: none.

`model` returns a tree of arrays, `loss(tree, batch)` a scalar; `train(place)` returns the tree of gradients, from
`place.model`, `place.batches` (those of all devices, one after the other) and `place.stack`, a Mesh with the axis
`data`. Without it, gradients are averaged by `psum` in a `shard_map`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from unisono_contrib.library.stacks._adapter import StackAdapter, misfit
from unisono_contrib.library.stacks._step import TrainingStep, numbers_of, total
from unisono_contrib.library.stacks._watch import SeenStep


class Jax(StackAdapter):
    """One process with a device for each rank."""

    library = "jax"
    extra = "'unisono[jax]'"
    processes = False

    def wrapped(self) -> Any:
        return self.bare

    def play(self, steps: int) -> list[SeenStep]:
        import jax  # pyright: ignore[reportMissingImports]

        place = self.place
        configure(place.groups)
        place.model = self.step.model()
        place.stack = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
        seen = []
        for number in range(steps):
            place.step = number
            place.batches = [self.step.batch(n) for n in numbers_of(number, place.groups, place.micros)]
            place.weights = [float(self.step.weight(batch)) for batch in place.batches]
            place.total_weight = total(place.weights)
            grads = self.step.train(place)
            seen.append(SeenStep(tensors(self.average() if grads is NotImplemented else grads)))
        return seen

    def average(self) -> Any:
        """Return the gradient: each device's micro-batches, then one sum over devices."""
        import jax  # pyright: ignore[reportMissingImports]
        import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
        from jax.sharding import PartitionSpec as P  # pyright: ignore[reportMissingImports]

        place, step = self.place, self.step
        shapes = {str(jax.tree.map(np.shape, batch)) for batch in place.batches}
        if len(shapes) > 1:
            what = f"micro-batches have {len(shapes)} shapes, and devices of a mesh compute one"
            raise misfit(what, 'check_stack("jax")', "batches of one shape, or a `train` of your own")
        batches = jax.tree.map(lambda *x: jnp.stack(x), *place.batches)
        parts = jnp.asarray([w / place.total_weight for w in place.weights])

        def device(tree: Any, mine: Any, part: Any) -> Any:
            def mean(tree: Any) -> Any:
                return sum(
                    part[m] * step.loss(tree, jax.tree.map(lambda x, m=m: x[m], mine))
                    for m in range(place.micros)
                )

            # Varying over devices first: else differentiation itself would add up over them.
            return jax.tree.map(
                lambda g: jax.lax.psum(g, "data"), jax.grad(mean)(jax.tree.map(varying, tree))
            )

        def varying(x: Any) -> Any:
            return jax.lax.pcast(x, ("data",), to="varying")

        spread = jax.shard_map(device, mesh=place.stack, in_specs=(P(), P("data"), P("data")), out_specs=P())
        return jax.jit(spread)(place.model, batches, parts)

    def train(self) -> None:
        raise NotImplementedError

    @staticmethod
    def alone(step: TrainingStep, argument: Mapping[str, Any]) -> dict[str, Any]:
        """Leave the shares of each step's gradient, by one device."""
        import jax  # pyright: ignore[reportMissingImports]

        configure(1)
        tree, order, every = step.model(), [], []
        gradient = jax.jit(jax.grad(step.loss))
        for number in range(argument["steps"]):
            batches = [step.batch(n) for n in numbers_of(number, argument["groups"], argument["micros"])]
            weights = [float(step.weight(batch)) for batch in batches]
            every.append([weight / total(weights) for weight in weights])
            for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
                share = {n: x * (weight / total(weights)) for n, x in tensors(gradient(tree, batch)).items()}
                order = list(share)
                save_file(share, Path(argument["folder"]) / f"share-{number}-{index}")
        return {
            "order": order,
            "backward": "",
            "coarsest": "",
            "clips": [1.0] * argument["steps"],
            "parts": every,
            "clip": 0.0,
        }


def configure(devices: int) -> None:
    """CPU devices, before JAX has begun with any."""
    import jax  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", torch.get_default_dtype() == torch.float64)
    jax.config.update("jax_num_cpu_devices", devices)


def tensors(tree: Any) -> dict[str, Tensor]:
    """The arrays of a tree by their paths."""
    import jax  # pyright: ignore[reportMissingImports]

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): torch.from_numpy(np.array(x))
        for path, x in leaves
    }
