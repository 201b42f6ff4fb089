"""torch.distributed.pipelining. options: `schedule`, by its class's name (Schedule1F1B, ScheduleGPipe, ...), `chunks`,
stages of each rank, and the schedule's keywords. Each rank holds stages; all have the same data."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono_contrib.library.stacks._adapter import StackAdapter, misfit
from unisono_contrib.library.stacks._step import TrainingStep, trainable
from unisono_contrib.library.stacks._watch import StackWatch, copied


class Seized(Exception):
    """What a model was called with."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.inputs = args


class Pipelining(StackAdapter):
    """Stages of consecutive layers. `wrap` may return a list of modules, the stages in their order; else the model is
    an `nn.Sequential`, which is cut into equal parts. place.stack: the schedule; place.model: this rank's stages."""

    draws: ClassVar[Mapping[str, Sequence[Any]] | None] = {
        "schedule": ("Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"),
    }
    models: ClassVar[Sequence[str]] = ("mlp",)

    @classmethod
    def groups(cls, ranks: int, options: Mapping[str, Any]) -> int:
        return 1

    def seat(self) -> int:
        return 0

    def begin(self) -> None:
        from torch.distributed import pipelining

        place, options = self.place, dict(self.place.options)
        self.by_id = {id(p): name for name, p in trainable(self.bare).items()}
        kind = getattr(pipelining, options.pop("schedule", "Schedule1F1B"))
        several = "Multi" in "".join(base.__name__ for base in kind.__mro__)
        chunks = options.pop("chunks", 2 if several else 1)
        stages = self.step.wrap(self.bare, place) or cut(self.bare, chunks * place.world)
        held = held_by(kind.__name__, place.rank, place.world, chunks)
        mine = [
            pipelining.PipelineStage(
                stages[index], index, len(stages), torch.device("cpu"), group=dist.group.WORLD
            )
            for index in held
        ]
        place.model = nn.ModuleList([stages[index] for index in held])
        place.optimizer = self.step.optimizer([p for p in place.model.parameters() if p.requires_grad])

        def loss(output: Tensor, micro: Tensor) -> Tensor:
            number = int(micro.flatten()[0])
            return (
                self.step.loss(lambda *_: output, place.batches[number]) * place.part(number) * place.micros
            )

        place.stack = kind(mine if several else mine[0], place.micros, loss_fn=loss, **options)
        self.first, self.last = 0 in held, len(stages) - 1 in held

    def train(self) -> None:
        place = self.place
        inputs = torch.cat([inputs_of(self.step, batch) for batch in place.batches])
        size = len(inputs) // place.micros
        micros = torch.arange(place.micros).repeat_interleave(size)
        entering = (inputs,) if self.first else ()
        place.stack.step(*entering, **({"target": micros} if self.last else {}))
        self.finish_stages()

    def finish_stages(self) -> None:
        """Clip by the norm over all stages, and step."""
        place = self.place
        if place.clip:
            params = [p for p in place.model.parameters() if p.grad is not None]
            squares = sum(
                (p.grad.double().square().sum() for p in params if p.grad is not None), torch.zeros(())
            )
            dist.all_reduce(squares)
            torch.nn.utils.clip_grads_with_norm_(params, place.clip, squares.sqrt())
        place.optimizer.step()
        place.optimizer.zero_grad()

    def settle(self, watch: StackWatch) -> None:
        """All ranks show all stages' gradients."""
        watch.steps[-1].gradients = gathered(watch.steps[-1].gradients)

    def named(self) -> dict[str, Tensor]:
        return {self.by_id[id(p)]: p for p in self.place.model.parameters() if id(p) in self.by_id}

    def weights(self) -> dict[str, Tensor]:
        return gathered({name: copied(p) for name, p in self.named().items()})


def gathered(mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks together. A collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(mine))
    return {name: x for held in every for name, x in held.items()}


def cut(model: nn.Module, count: int) -> Sequence[nn.Module]:
    """A sequence of layers in `count` parts. Raises UsageError V09."""
    layers = list(model.children())
    if not isinstance(model, nn.Sequential) or len(layers) < count:
        raise misfit(
            f"{type(model).__name__} of {len(layers)} layers cannot be cut into {count} stages",
            'check_stack("pipelining")',
            "an nn.Sequential of enough layers, or a `wrap` that returns the list of stages",
        )
    bounds = [round(i * len(layers) / count) for i in range(count + 1)]
    return [nn.Sequential(*layers[a:b]) for a, b in pairwise(bounds)]


def held_by(schedule: str, rank: int, world: int, chunks: int) -> list[int]:
    """The stages of a rank: in a loop, or back and forth where the schedule's name says V."""
    if "ZBV" in schedule or "DualPipeV" in schedule:
        return [rank, 2 * world - 1 - rank]
    return [rank + world * chunk for chunk in range(chunks)]


def inputs_of(step: TrainingStep, batch: Any) -> Tensor:
    """What the loss gives the model of a micro-batch. Raises UsageError V09 where that is not one tensor."""

    def seize(*args: Any, **_: Any) -> NoReturn:
        raise Seized(*args)

    try:
        step.loss(seize, batch)
    except Seized as seized:
        if len(seized.inputs) == 1 and isinstance(seized.inputs[0], Tensor):
            return seized.inputs[0]
    fix = "a `loss` that calls model(x) with one tensor"
    raise misfit("a pipeline's first stage takes one tensor", 'check_stack("pipelining")', fix)
