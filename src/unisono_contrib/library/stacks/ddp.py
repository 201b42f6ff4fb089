"""torch's DistributedDataParallel (Li et al. 2020). options: its keywords; `accumulate` says whether gradients meet
with the `last` micro-batch, under `no_sync` before it, or with `each`."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

from torch.nn.parallel import DistributedDataParallel

from unisono_contrib.library.stacks._adapter import StackAdapter


class Ddp(StackAdapter):
    """Micro-batches under `no_sync`, but for the last."""

    draws: ClassVar[Mapping[str, Sequence[Any]] | None] = {
        "accumulate": ("last", "each"),
        "gradient_as_bucket_view": (False, True),
        "bucket_cap_mb": (25, 0.0001),  # many buckets
        "broadcast_buffers": (True, False),
        "find_unused_parameters": (False, True),
        "static_graph": (False, True),
    }
    for_unused: ClassVar[Mapping[str, Any]] = {"find_unused_parameters": True}

    def wrapped(self) -> Any:
        options = {key: value for key, value in self.place.options.items() if key != "accumulate"}
        return DistributedDataParallel(self.bare, **options)

    def train(self) -> None:
        place = self.place
        for micro, batch in enumerate(place.batches):
            last = micro == len(place.batches) - 1
            meets = last or place.options.get("accumulate") == "each"
            with nullcontext() if meets else place.model.no_sync():
                (self.step.loss(place.model, batch) * place.part(micro)).backward()
        self.finish()
