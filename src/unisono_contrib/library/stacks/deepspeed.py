"""DeepSpeed on CPUs. options: its config; an `optimizer` section there takes the place of the step's optimiser."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from unisono.library.gradient_check import plain_name
from unisono_contrib.library.stacks._adapter import StackAdapter
from unisono_contrib.library.stacks._watch import StackWatch, copied

SHM = "deepspeed_shm_comm"


class DeepSpeed(StackAdapter):
    """`engine.backward` and `engine.step` for each micro-batch. place.stack and place.model: the engine."""

    library = extra = "deepspeed"
    dtype: ClassVar[str] = "float32"  # of ZeRO's flat buffers
    shows_clipped: ClassVar[bool] = False
    draws: ClassVar[Mapping[str, Sequence[Any]] | None] = {
        "zero_optimization": (
            {"stage": 0},
            {"stage": 1},
            {"stage": 2},
            {"stage": 3},
            {"stage": 1, "reduce_bucket_size": 50},
            {"stage": 2, "overlap_comm": True},
            {"stage": 2, "contiguous_gradients": False},
            {"stage": 3, "stage3_param_persistence_threshold": 0},
        ),
        "prescale_gradients": (False, True),
    }
    models: ClassVar[Sequence[str]] = ("mlp", "norms", "frozen", "twice", "gpt", "moe")

    def begin(self) -> None:
        import deepspeed  # pyright: ignore[reportMissingImports]

        on_processors_alone(deepspeed)
        place = self.place
        wrapped = self.step.wrap(self.bare, place)
        params = [p for p in self.bare.parameters() if p.requires_grad]
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": place.micros,
            "gradient_clipping": place.clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        } | place.options
        optimizer = None if "optimizer" in config else self.step.optimizer(params)
        if wrapped is None:
            wrapped, *_ = deepspeed.initialize(
                model=self.bare,
                model_parameters=params,
                optimizer=optimizer,
                config=config,
                dist_init_required=True,
            )
        place.stack = place.model = wrapped
        place.optimizer = wrapped.optimizer

    def run(self, steps: int, watch: StackWatch) -> None:
        engine, step = self.place.stack, self.place.stack.step

        def seen(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                watch.take(self._gradients())
            return step(*args, **kwargs)

        engine.step = seen
        super().run(steps, watch)

    def train(self) -> None:
        place, engine = self.place, self.place.stack
        for micro, batch in enumerate(place.batches):
            # `backward` divides by the micro-batches.
            engine.backward(self.step.loss(engine, batch) * place.part(micro) * place.micros)
            engine.step()

    def _gradients(self) -> dict[str, Tensor]:
        """Return whole gradients of this rank, {} where this version does not show them. A collective."""
        from deepspeed.utils import safe_get_full_grad  # pyright: ignore[reportMissingImports]

        engine = self.place.stack
        zero = engine.zero_optimization()
        if zero and str(engine.optimizer_name()).lower() == "muon":  # what it keeps then are updates
            return {}
        read = safe_get_full_grad if zero else (lambda p: p.grad)
        seen = {name: read(p) for name, p in self.named().items()}
        return {} if any(grad is None for grad in seen.values()) else {n: copied(g) for n, g in seen.items()}

    def named(self) -> dict[str, Tensor]:
        return {plain_name(n): p for n, p in self.place.stack.module.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param  # pyright: ignore[reportMissingImports]

        zero = self.place.stack.zero_optimization()
        return {n: copied(safe_get_full_fp32_param(p) if zero else p) for n, p in self.named().items()}


def on_processors_alone(deepspeed: Any) -> None:
    """Compute on CPUs, and have collectives go through Gloo. DeepSpeed would compile an operation of its own at its
    first start, which takes a minute or more, and a build that is cut off leaves a lock, on which all later ones wait
    without an end. The memory that it shares is named by user and port alone, so that two jobs at a time meet in it."""
    from deepspeed.accelerator import cpu_accelerator, set_accelerator  # pyright: ignore[reportMissingImports]

    set_accelerator(cpu_accelerator.CPU_Accelerator())
    deepspeed.ops.__compatible_ops__[SHM] = False
