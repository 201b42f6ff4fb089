"""A plan of ours in `transformers.Trainer`, by one argument:

    trainer = unisono.trainer(Trainer, plan="dp=2")(model=model, args=args, train_dataset=data)

started as any script of several ranks is. To the Trainer there is one device, and `per_device_train_batch_size` is the
global batch: so steps, schedules, the tokens that a loss is divided by and what is logged are those of one process.
Checkpoints are the Trainer's own folders, whole, and go on under any plan. What it writes in torch's format it reads
back by `weights_only`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unisono.comm.device import is_apart
from unisono.library.batches import cut, samples_in
from unisono.library.current_batch import BatchShard, Walk, part
from unisono.library.enter import init
from unisono.library.gather import gather
from unisono.library.job import Job
from unisono.library.sharding import whole_model, whole_optimizer
from unisono.plan import Plan
from unisono.spec.errors import UsageError

if TYPE_CHECKING:
    from unisono.library.batch_sharding import ShardedLoader


def trainer(base: type, plan: str | Plan = "dp=-1", *, job: Job | None = None, strict: bool = False) -> type:
    """Return a subclass of a transformers.Trainer whose ranks share the work: `trainer(Trainer, plan="dp=2")(...)`.

    base: `transformers.Trainer` or a subclass. plan: `dp` and `shard`. job: an existing job, as `unisono.prove(loop,
    ...)` passes it. strict: as in `unisono.init`.

    Raises UsageError J20 if transformers or accelerate is missing, J24 if `base` is no Trainer.
    """
    try:
        import accelerate  # noqa: F401
        from transformers import Trainer
    except ImportError as missing:
        raise UsageError(
            f"transformers.Trainer cannot be imported ({missing})",
            where="unisono.trainer",
            fix="pip install 'unisono[hf]'",
            code="J20",
        ) from missing
    if not (isinstance(base, type) and issubclass(base, Trainer)):
        raise UsageError(
            f"{base!r} is no transformers.Trainer",
            where="unisono.trainer",
            fix="unisono.trainer(Trainer, plan=...)(model=..., args=..., train_dataset=...)",
            code="J24",
        )
    run_job = init(plan, strict=strict) if job is None else job
    return type(f"{base.__name__}OnRanks", (TrainerOnRanks, base), {"job": run_job})


class DealtPasses:
    """The Trainer's loader, dealt."""

    def __init__(self, dealt: "ShardedLoader", loader: Any) -> None:
        self._dealt, self._loader = dealt, loader
        self.skip = dealt.skip

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dealt)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)


class TrainerOnRanks:
    """What of a transformers.Trainer is another with several ranks; the rest is the class behind it."""

    job: Job
    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    model_accepts_loss_kwargs: bool
    compute_loss_func: Any
    _walk: Iterator[Any] | None = None
    _evaluates: bool = False
    _is_sum: bool | None = None
    compute_loss: Any
    _prepare_inputs: Any

    # one device, as the Trainer sees it

    def create_accelerator_and_postprocess(self) -> None:
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import clear_environment

        on_cpu = not is_apart(self.job.device)
        AcceleratorState._reset_state(reset_partial_state=True)
        with clear_environment():  # the ranks are ours: accelerate is told of none
            state: Any = PartialState(cpu=on_cpu)
        state.device = self.job.device
        state.process_index = self.job.rank  # who prints and writes
        state.local_process_index = self.job.rank if on_cpu else self.job.device.index
        self.args.__dict__["_setup_devices"] = self.job.device
        self.args.distributed_state, self.args._n_gpu = state, 0 if on_cpu else 1
        self._super("create_accelerator_and_postprocess")

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if training:
            if not self.job.knows(model):
                self.job.prepare(model, self.optimizer)
        elif not self.job.knows(model):
            for tensor in (*model.parameters(), *model.buffers()):
                self.job.mesh.data.broadcast(tensor.detach())
        return self._super("_wrap_model", model, training, dataloader)

    # data

    def get_train_dataloader(self) -> Any:
        loader = self._super("get_train_dataloader")
        return DealtPasses(self.job.deal(getattr(loader, "base_dataloader", loader)), loader)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        passes, epoch = kwargs["train_dataloader"], kwargs["epoch"]
        resumes = epoch == kwargs["epochs_trained"] and kwargs["resume_from_checkpoint"] is not None
        if resumes and not self.args.ignore_data_skip:
            passes.skip(kwargs["steps_trained_in_current_epoch"])
        passes.set_epoch(epoch)
        self._walk = iter(passes)
        try:
            return self._super("_run_epoch", *args, **kwargs)
        finally:
            self._walk = None

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """From the dealt pass, which also skips; the Trainer's own iterator stays where it is."""
        return self._super("get_batch_samples", self._walk or epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Targets of all ranks' samples, as one process counts them."""
        count = self._super("_get_num_items_in_batch", batch_samples, device)
        if count is None or self._evaluates:
            return count
        idle = [batch for batch in batch_samples if self._borrowed(batch)]
        less = self._super("_get_num_items_in_batch", idle, device) if idle else 0
        total = self.job._exchange.sums([float(count - less)])[0]
        return torch.tensor(total, device=device) if isinstance(count, Tensor) else total

    def _borrowed(self, batch: Any) -> bool:
        known = self.job._batch.of(batch)
        return known is not None and known.borrowed

    # steps

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The loss is that of the global batch on every rank."""
        batch = self.job._batch.of(inputs)
        if (
            num_items_in_batch is not None
            and batch is not None
            and self._divides(model, inputs, num_items_in_batch)
        ):
            batch.ratio = 0.0 if batch.borrowed else float(self.job.mesh.data.size)
            batch.weighed = True  # they add up
        last = self.accelerator.gradient_state.sync_gradients
        with nullcontext() if last else self.job.accumulate():
            loss = self._super("training_step", model, inputs, num_items_in_batch)
        return torch.as_tensor(self.job.mean(loss), dtype=loss.dtype, device=loss.device)

    @torch.no_grad()
    def _divides(self, model: nn.Module, inputs: Any, count: Any) -> bool:
        """Whether the loss is a sum divided by the count of targets that it is given: some models take the count and
        make a mean over the samples at hand all the same. Found by two forwards, before the first step."""
        if self._is_sum is None:
            trains = model.training
            model.eval()
            losses = [float(self.compute_loss(model, dict(self._prepare_inputs(inputs)), num_items_in_batch=n).sum())
                      for n in (count, count * 2)]  # fmt: skip
            model.train(trains)
            whole, half = self.job._exchange.sums([x if x == x else 0.0 for x in losses])
            self._is_sum = half < 0.75 * whole
        return self._is_sum

    def _clip_grad_norm(self, model: nn.Module) -> float:
        return self.job.clip(self.args.max_grad_norm, self.model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.job.clip(float("inf"), self.model) if grad_norm is None else grad_norm

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Each rank computes its part of the batch; loss, outputs and labels are then those of all of it."""
        group, count = self.job.mesh.data, samples_in(inputs)
        if group.size == 1 or not count:
            return self._super("prediction_step", model, inputs, prediction_loss_only, ignore_keys)
        low, high = part(count, group.index, group.size)
        mine = cut(inputs, count, *((low, high) if high > low else (0, 1)))
        self._evaluates = True  # a mean over this rank's targets, put together below
        try:
            loss, logits, labels = self._super(
                "prediction_step", model, mine, prediction_loss_only, ignore_keys
            )
        finally:
            self._evaluates = False
        batch = BatchShard(low, high, count, 1.0, Walk(-1, 0))
        if loss is not None:
            loss = self._mean_of(loss, mine, batch)
        return loss, _gathered(logits, batch, group), _gathered(labels, batch, group)

    def _mean_of(self, loss: Tensor, mine: Any, batch: BatchShard) -> Tensor:
        """A mean over targets where they can be counted, over samples elsewhere."""
        labels, count = mine.get("labels") if hasattr(mine, "get") else None, float(batch.samples)
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            seen = labels[..., 1:] if getattr(self, "_loss_shifts_labels", False) else labels
            count = float(seen.ne(-100).sum())
        count *= not batch.borrowed
        total, value = self.job._exchange.sums([count, float(loss.mean()) * count if count else 0.0])
        return torch.as_tensor(value / total if total else float("nan"), dtype=loss.dtype, device=loss.device)

    # checkpoints: whole, from the first rank

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        whole = whole_model(self.model) if state_dict is None else state_dict
        if self.args.should_save:
            sharded, kind = self.job.plan.shard > 1, type(self.model)
            if sharded:
                # Its own class, whose name stands in the configuration.
                self.model.__class__ = kind.__mro__[2]
            try:
                self._super("_save", output_dir, whole)
            finally:
                if sharded:
                    self.model.__class__ = kind
        self.job.ranks.wait()

    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        whole = whole_optimizer(getattr(self.optimizer, "optimizer", self.optimizer))
        if self.args.should_save:
            torch.save(whole, Path(output_dir) / "optimizer.pt")
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _save_rng_state(self, output_dir: Any) -> None:
        streams = self.job._streams
        streams.to_script()
        if self.args.should_save:
            self._super("_save_rng_state", output_dir)
        self.job.ranks.wait()
        save_file(
            {"own": streams.state},
            Path(output_dir) / f"stream-{self.job.rank}-of-{self.job.world}.safetensors",
        )

    def _load_rng_state(self, checkpoint: Any) -> None:
        streams = self.job._streams
        streams.to_script()
        self._super("_load_rng_state", checkpoint)
        stream = Path(checkpoint or ".") / f"stream-{self.job.rank}-of-{self.job.world}.safetensors"
        if checkpoint is not None and self.job.world > 1 and stream.is_file():
            streams.state = load_file(stream)["own"]

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._super("_save_checkpoint", model, trial)
        self.job.ranks.wait()

    def _super(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(), name)(*args, **kwargs)


def _gathered(x: Any, batch: BatchShard, group: Any) -> Any:
    """Rows of the whole batch, in the nesting of x."""
    if isinstance(x, Tensor):
        return gather(x, batch, group) if x.dim() else x
    if isinstance(x, (list, tuple)):
        return type(x)(_gathered(inner, batch, group) for inner in x)
    if isinstance(x, dict):
        return {key: _gathered(inner, batch, group) for key, inner in x.items()}
    return x
