"""torch's DistributedDataParallel (Li et al. 2020). options: its keywords."""

from contextlib import nullcontext
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from unisono_contrib.library.stacks._adapter import StackAdapter


class Ddp(StackAdapter):
    """Micro-batches under `no_sync`, but for the last."""

    def wrapped(self) -> Any:
        return DistributedDataParallel(self.bare, **self.place.options)

    def train(self) -> None:
        place = self.place
        for micro, batch in enumerate(place.batches):
            last = micro == len(place.batches) - 1
            with nullcontext() if last else place.model.no_sync():
                (self.step.loss(place.model, batch) * place.part(micro)).backward()
        self.finish()
