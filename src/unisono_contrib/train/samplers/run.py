"""The samplers of a run, for all its ranks: weights of any plan go out whole, samples come back to every rank."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.train.step.run import Run
from unisono_contrib.sync._servers import wire
from unisono_contrib.train.samplers.pool import DrawnSamples, Request, SamplerPool
from unisono_contrib.train.samplers.weights import WeightHolder, whole_weights


class RunSamplers:
    """Every rank of the run makes it and calls each method, or it hangs; the first one talks to samplers.

    count: of samplers. bound: versions that a sample may be behind the step that trains it; at 0, `sync` waits until
    all samplers have acknowledged. holder(): a model of the recipe for the first rank, see `SamplerPool`. Raises
    ValueError where no process can stand beside the ranks.
    """

    def __init__(self, run: Run, count: int, bound: int, holder: Callable[[], WeightHolder]) -> None:
        self._run, self._bound, self._pool = run, bound, None
        if run.replica.beside is None:
            raise ValueError("no process stands beside these ranks")
        if run.mesh.world.index == 0:
            self._pool = SamplerPool(run.replica.beside, count, bound, holder())

    def sync(self, version: int) -> None:
        """Send the run's weights as this version. Raises WeightsNotHeld, SamplerLost."""
        weights = whole_weights(self._run)
        if self._pool is not None:
            self._pool.publish(version, weights)
            if not self._bound:
                self._pool.settle()

    def ask(self, step: int, requests: Sequence[Request]) -> None:
        """Ask for the samples of a step; requests are the first rank's. See `SamplerPool.ask`."""
        if self._pool is not None:
            self._pool.ask(step, requests)

    def collect(self, step: int) -> list[DrawnSamples]:
        """The samples of a step, the same on every rank. Raises what `SamplerPool.collect` does."""
        drawn = self._pool.collect(step) if self._pool is not None else []
        said, tensors = self._spread(drawn)
        parts = iter(tensors)
        return [DrawnSamples(version, [next(parts) for _ in range(count)]) for version, count in said]

    def _spread(self, drawn: Sequence[DrawnSamples]) -> tuple[list[list[int]], list[Tensor]]:
        """From the first rank to all."""
        world, device = self._run.mesh.world, self._run.local.device
        said = [[each.version, len(each.tensors)] for each in drawn]
        data = wire.packed({"drawn": said}, [x for each in drawn for x in each.tensors]) if drawn else b""
        size = world.broadcast(torch.tensor([len(data)], device=device))
        letters = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(int(size), dtype=torch.uint8)
        )
        whole, tensors = wire.unpacked(world.broadcast(letters.to(device)).cpu().numpy().tobytes())
        return whole["drawn"], [x.to(device) for x in tensors if x is not None]

    def close(self) -> None:
        """Hang up; the samplers wait for whoever calls next, until the run is over."""
        if self._pool is not None:
            self._pool.close()
