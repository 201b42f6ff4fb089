"""torch's `fully_shard`, FSDP2. options: its keywords; `children` says whether each child is a group of its own."""

from typing import Any

from torch.distributed.fsdp import fully_shard

from unisono_contrib.library.stacks._adapter import StackAdapter


class Fsdp2(StackAdapter):
    """Gradients of micro-batches are reduced with the last one's."""

    def wrapped(self) -> Any:
        options = dict(self.place.options)
        if options.pop("children", True):
            for child in self.bare.children():
                if any(True for _ in child.parameters()):
                    fully_shard(child, **options)
        return fully_shard(self.bare, **options)

    def train(self) -> None:
        place = self.place
        for micro, batch in enumerate(place.batches):
            place.model.set_requires_gradient_sync(micro == len(place.batches) - 1)
            (self.step.loss(place.model, batch) * place.part(micro)).backward()
        self.finish()
