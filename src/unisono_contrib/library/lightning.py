"""A plan of ours in a Lightning Trainer, by one argument:

    from unisono_contrib.library.lightning import UnisonoStrategy
    trainer = Trainer(strategy=UnisonoStrategy("dp=2"), ...)

started as any script of several ranks is (`torchrun --standalone --nproc-per-node 2 script.py`). Batches are global
ones, as everywhere in the library way, so epochs, steps, learning rates and losses are those of one device. Checkpoints
are Lightning's own files with whole weights and whole optimiser states: one device loads them, and any other plan.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from unisono.library.enter import init
from unisono.library.exchange import spread
from unisono.library.job import Job
from unisono.library.sharding import whole_model, whole_optimizer
from unisono.plan import Plan
from unisono.spec.errors import UsageError

try:
    from lightning.fabric.utilities.rank_zero import rank_zero_only as rank_zero_of_fabric
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import ParallelStrategy, Strategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ImportError as missing:
    raise UsageError(
        f"Lightning cannot be imported ({missing})",
        where="unisono.library.lightning",
        fix="pip install 'unisono[lightning]'",
        code="J20",
    ) from missing


class UnisonoStrategy(ParallelStrategy):
    """Spreads a LightningModule under a plan of `dp` and `shard`.

    plan: as of `unisono.init`. job: one that is there already, as `unisono.prove(loop, ...)` gives it. blocks: names of
    the submodules that `shard` gathers one at a time. strict: raise what is else told.
    """

    strategy_name = "unisono"

    def __init__(
        self,
        plan: str | Plan = "dp=-1",
        *,
        job: Job | None = None,
        blocks: Sequence[str] = (),
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.job = init(plan, strict=strict) if job is None else job
        self._blocks = tuple(blocks)
        self._in_step = False

    # which rank this is

    @property
    def root_device(self) -> torch.device:
        return self.job.device

    @property
    def global_rank(self) -> int:
        return self.job.rank

    @property
    def local_rank(self) -> int:
        return self.job.rank if self.job.device.index is None else self.job.device.index

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return self.job.world

    @property
    def is_global_zero(self) -> bool:
        return self.job.is_main

    @property
    def is_distributed(self) -> bool:
        """To Lightning: whether what is logged is to be put together."""
        return self.world_size > 1

    def set_world_ranks(self) -> None:
        """Lightning asks these who prints."""
        rank_zero_only.rank = rank_zero_of_fabric.rank = self.job.rank

    # model, optimisers, data

    def model_to_device(self) -> None:
        if self.model is not None:
            self.model.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        trainer._accelerator_connector.use_distributed_sampler = False  # the data is dealt here
        super().setup(trainer)
        module = self._module()
        if trainer.state.fn != TrainerFn.FITTING and not self.job.knows(module):  # to be evaluated alone
            spread([*module.parameters(), *module.buffers()], self.job.mesh.data)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        module = self._module()
        if self.job.plan.shard > 1 and not module.automatic_optimization:
            raise UsageError(
                "manual optimisation calls parts of the module in an order that shards cannot follow",
                where=f"{type(module).__name__}.automatic_optimization",
                fix="the same ranks as dp, or a loop of your own with job.prepare for each model",
                code="J21",
            )
        blocks = [module.get_submodule(name) for name in self._blocks] or None
        self.job.prepare(module, list(self.optimizers), blocks=blocks)

    def process_dataloader(self, dataloader: object) -> object:
        return self.job.deal(dataloader)

    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("no LightningModule is connected")
        return self.lightning_module

    # steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context(), self._step():
            if self._module().automatic_optimization:
                return self._through_forward("training_step", *args, **kwargs)
            return self._module().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context(), self._step():
            return self._through_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context(), self._step():
            return self._through_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context(), self._step():
            return self._through_forward("predict_step", *args, **kwargs)

    def _through_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The step as a forward of the module: what `prepare` hangs there sees the batch."""
        return self._forward_redirection(self._module(), self._module(), name, *args, **kwargs)

    def on_validation_end(self) -> None:
        """Lightning puts random numbers back after a check of two batches: the script's, which the ranks share."""
        self.job._streams.to_script()

    @contextmanager
    def _step(self) -> Generator[None]:
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward come before the step and not inside of it, unless the optimiser asks for them again."""
        if isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        loss = closure()
        return super().optimizer_step(optimizer, lambda: loss, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        with self.job.accumulate():
            yield

    # what ranks tell each other

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Inside a step a mean is that of the global batch; elsewhere all ranks count the same."""
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        mean = str(reduce_op).lower().rpartition(".")[2] in ("mean", "avg", "none")
        if mean and self._in_step:
            value = self.job.mean(tensor)
            return torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
        whole = self.job.mesh.data.all_reduce(tensor.detach().to(torch.float64))
        if mean and not tensor.is_floating_point():
            return whole / self.world_size
        return (whole / self.world_size if mean else whole).to(tensor.dtype)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if sync_grads:
            raise UsageError(
                "all_gather(sync_grads=True) would count its gradients by rank and not by sample",
                where="LightningModule.all_gather",
                fix="self.trainer.strategy.job.gather(x), whose gradients are those of the global batch",
                code="J21",
            )
        flat = self.job.mesh.data.all_gather(tensor.detach().contiguous().view(-1))
        return flat.view(self.world_size, *tensor.shape)

    def barrier(self, name: str | None = None) -> None:
        self.job.mesh.data.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.job.ranks.broadcast(obj, src)

    # checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return whole_model(self._module())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return whole_optimizer(inner)

    def teardown(self) -> None:
        """The groups stay: they are the job's."""
        Strategy.teardown(self)
