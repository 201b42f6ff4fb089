"""transformers' Trainer. options: TrainingArguments. The loss is the model's own, or the Trainer's.

`batch` returns a mapping of tensors [rows, ...]; rows are handed to ranks in the Trainer's own order. `wrap` may return
a Trainer, and gets what the adapter would pass to it: `place.options` with its arguments, `place.stack` its class.
"""

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler

from unisono.library.gradient_check import plain_name
from unisono_contrib.library.stacks._adapter import StackAdapter, misfit
from unisono_contrib.library.stacks._step import numbers_of, trainable
from unisono_contrib.library.stacks._watch import StackWatch


class Transformers(StackAdapter):
    """`Trainer.train` over the rows in their order. place.stack: the Trainer; place.batches: all rows."""

    library = "transformers"
    extra = "'unisono[hf]'"
    owns_loop = True
    draws: ClassVar[Mapping[str, Sequence[Any]] | None] = {
        "ddp_bucket_cap_mb": (None, 1),
        "ddp_broadcast_buffers": (None, False),
        "ddp_find_unused_parameters": (None, True),
    }
    for_unused: ClassVar[Mapping[str, Any]] = {"ddp_find_unused_parameters": True}

    def begin(self) -> None:
        place = self.place
        place.model, place.batches = self.bare, self.rows()
        wrapped = self.step.wrap(self.bare, place)
        place.stack = self.wrapped() if wrapped is None else wrapped

    def rows(self) -> list[Any]:
        """Every row of all steps. Raises UsageError V09 where batches are no mappings of tensors of one height."""
        place, rows = self.place, []
        for number in numbers_of(0, place.groups, place.micros * self.steps):
            batch = self.step.batch(number)
            if not isinstance(batch, Mapping) or len({len(x) for x in batch.values()}) != 1:
                what = f"batch({number}) is no mapping of tensors with one number of rows"
                raise misfit(what, 'check_stack("transformers")', 'return {"input_ids": ids, "labels": ids}')
            height = len(next(iter(batch.values())))
            rows += [{key: x[row] for key, x in batch.items()} for row in range(height)]
        return rows

    def arguments(self, kind: type) -> Any:
        """Return the Trainer's arguments: those of one plain run, and the options."""
        place = self.place
        self.folder = tempfile.TemporaryDirectory(prefix="unisono-stack-")
        height = len(place.batches) // (place.groups * place.micros * self.steps)
        return kind(**{
            "output_dir": self.folder.name, "per_device_train_batch_size": height, "use_cpu": True,
            "gradient_accumulation_steps": place.micros, "max_steps": self.steps, "max_grad_norm": place.clip,
            "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
            "dataloader_pin_memory": False, "lr_scheduler_type": "constant",
        } | self.habits() | place.options)  # fmt: skip

    def habits(self) -> dict[str, Any]:
        """Return arguments that only this kind of Trainer has."""
        return {}

    def optimizers(self) -> tuple[Any, Any]:
        """Return the step's optimiser, and a rate that stays."""
        optimizer = self.step.optimizer(list(trainable(self.bare).values()))
        return optimizer, LambdaLR(optimizer, lambda _: 1.0)

    def wrapped(self) -> Any:
        from transformers import Trainer, TrainingArguments, default_data_collator

        return in_order(Trainer)(
            model=self.bare, args=self.arguments(TrainingArguments), train_dataset=self.place.batches,
            data_collator=default_data_collator, optimizers=self.optimizers(),
        )  # fmt: skip

    def play(self, steps: int) -> Any:
        self.steps = steps
        return super().play(steps)

    def run(self, steps: int, watch: StackWatch) -> None:
        self.place.stack.train()

    def named(self) -> dict[str, Tensor]:
        return {plain_name(name): p for name, p in self.bare.named_parameters() if p.requires_grad}


def in_order(base: type) -> type:
    """A Trainer that takes rows in their order."""

    def sampler(self: Any, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if dataset is None else dataset)

    return type(f"{base.__name__}InOrder", (base,), {"_get_train_sampler": sampler})
