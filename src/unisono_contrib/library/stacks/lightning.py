"""Lightning. options: keywords of its Trainer; `ddp` has those of its DDP. `wrap` may return a
LightningModule that holds the model."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.data import DataLoader

from unisono_contrib.library.stacks._adapter import StackAdapter
from unisono_contrib.library.stacks._step import trainable
from unisono_contrib.library.stacks._watch import StackWatch


class Lightning(StackAdapter):
    """`Trainer.fit` with automatic optimisation under its DDP strategy. place.stack: the Trainer."""

    library = extra = "lightning"
    owns_loop = True
    draws: ClassVar[Mapping[str, Sequence[Any]] | None] = {
        "precision": ("32-true", "64-true"),
        "ddp": ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.0001}),
    }
    for_unused: ClassVar[Mapping[str, Any]] = {"ddp": {"find_unused_parameters": True}}

    def begin(self) -> None:
        self.by_id = {id(p): name for name, p in trainable(self.bare).items()}
        wrapped = self.step.wrap(self.bare, self.place)
        self.place.model = self.wrapped() if wrapped is None else wrapped

    def wrapped(self) -> Any:
        from lightning.pytorch import LightningModule

        step, bare = self.step, self.bare

        class StepModule(LightningModule):
            """The user's step as a LightningModule."""

            def __init__(self) -> None:
                super().__init__()
                self.net = bare

            def training_step(self, batch: tuple[Any, float], index: int) -> Tensor:
                # The strategy takes the mean over ranks, and the Trainer divides by the micro-batches.
                return step.loss(self.net, batch[0]) * batch[1]

            def configure_optimizers(self) -> Any:
                return step.optimizer([p for p in self.parameters() if p.requires_grad])

            def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
                return batch

        return StepModule()

    def run(self, steps: int, watch: StackWatch) -> None:
        from lightning.fabric.plugins.environments import TorchElasticEnvironment
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import DDPStrategy

        place = self.place
        rows: list[tuple[Any, float]] = []
        for number in range(steps):
            self.load(number)
            rows += [(batch, place.part(micro) * place.micros) for micro, batch in enumerate(place.batches)]
        options: dict[str, Any] = {
            "accelerator": "cpu", "devices": place.world, "num_nodes": 1, "max_epochs": 1, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "use_distributed_sampler": False, "accumulate_grad_batches": place.micros,
            "gradient_clip_val": place.clip or None,
        } | place.options  # fmt: skip
        ddp = options.pop("ddp", {})
        if "strategy" not in options:
            environment = TorchElasticEnvironment()
            options["strategy"] = DDPStrategy(
                cluster_environment=environment, process_group_backend="gloo", **ddp
            )
        place.stack = Trainer(**options)
        place.stack.fit(place.model, DataLoader(rows, batch_size=None, shuffle=False))  # type: ignore[arg-type]

    def named(self) -> dict[str, Tensor]:
        model: nn.Module = self.place.model
        return {self.by_id[id(p)]: p for p in model.parameters() if id(p) in self.by_id}
