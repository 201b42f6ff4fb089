"""Hugging Face Accelerate. options: keywords of `Accelerator`; `ddp` has those of its DDP."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from unisono_contrib.library.stacks._adapter import StackAdapter


class Accelerate(StackAdapter):
    """`accelerator.accumulate`, `backward` and `clip_grad_norm_`, as in its examples. place.stack: the Accelerator."""

    library = extra = "accelerate"
    draws: ClassVar[Mapping[str, Sequence[Any]] | None] = {
        "ddp": (
            {},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"bucket_cap_mb": 0.0001, "find_unused_parameters": True},
        ),
        "split_batches": (False, True),
    }
    for_unused: ClassVar[Mapping[str, Any]] = {"ddp": {"find_unused_parameters": True}}

    def begin(self) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        place = self.place
        options = {"cpu": True, "gradient_accumulation_steps": place.micros} | place.options
        if ddp := options.pop("ddp", None):
            options["kwargs_handlers"] = [DistributedDataParallelKwargs(**ddp)]
        place.stack = Accelerator(**options)
        wrapped = self.step.wrap(self.bare, place)
        model = self.bare if wrapped is None else wrapped
        optimizer = self.step.optimizer([p for p in model.parameters() if p.requires_grad])
        place.model, place.optimizer = place.stack.prepare(model, optimizer)

    def train(self) -> None:
        place, accelerator = self.place, self.place.stack
        for micro, batch in enumerate(place.batches):
            with accelerator.accumulate(place.model):
                # `backward` divides by the micro-batches.
                accelerator.backward(self.step.loss(place.model, batch) * place.part(micro) * place.micros)
                if accelerator.sync_gradients and place.clip:
                    accelerator.clip_grad_norm_(place.model.parameters(), place.clip)
                place.optimizer.step()
                place.optimizer.zero_grad()
