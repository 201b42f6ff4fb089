"""How the gradients of one prepared model become those of the global batch.

Each rank's backward leaves the gradient of a mean over its own samples. Weighted by its share and averaged over the
data ranks, that is the gradient of the mean over the global batch. It is there when `backward` returns: buckets
leave while backward runs, and the last act of the backward waits for them. So whatever reads gradients between
`backward` and `step` reads the ones that a single device would have.

Averaging again changes nothing: a gradient that is the same on all ranks is its own average. So several backwards in a
step, with or without an exchange after each, add up to the same.

With them travel a few words of the weights, so that replicas are compared without a message of their own. Whatever lets
replicas part reaches nearly all weights within a step; so a few weights at a time are enough, others at each look.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from unisono.comm.bucket import Bucket
from unisono.comm.group import Group
from unisono.library.current_batch import CurrentBatch
from unisono.library.exchange import ScalarExchange
from unisono.library.user_hooks import DeferredHooks, begin_all
from unisono.parallel.params import Slot, local_of
from unisono.parallel.shard import ShardScatter
from unisono.spec.errors import UserCodeError
from unisono.spec.words import listed
from unisono.sync.every_step import EveryStepSync
from unisono.train.step.gradients import Gradients
from unisono.train.step.numbers import LossPlaces
from unisono.train.watch.copies import checksum

PERIOD = 8  # backwards between two looks, after the first ones
FIRST = 16
WORDS = 1024  # numbers of a weight that a look takes
WEIGHTS = 4  # of which a look takes some
SHORT = 0xFFFF  # what is left of a sum: with it, sums of squares over ranks stay exact in float64


class Replicas:
    """The weights of one model, which the ranks of `dp` all hold."""

    def __init__(self, slots: Sequence[Slot], dp: Group) -> None:
        self._slots, self._dp, self._backwards, self._looks = tuple(slots), dp, 0, 0

    def due(self) -> bool:
        """Whether this backward takes a look; it is counted."""
        self._backwards += 1
        return self._backwards <= FIRST or self._backwards % PERIOD == 0

    @torch.no_grad()
    def words(self) -> Tensor:
        """float64 [2]: a sum over some weights, and its square."""
        sums = [checksum(part) for _, part in self._parts()]
        short = (torch.stack(sums).sum() & SHORT).to(torch.float64)
        return torch.stack([short, short * short])

    def _parts(self) -> list[tuple[Slot, Tensor]]:
        count = len(self._slots)
        places = [(self._looks * WEIGHTS + i) % count for i in range(min(WEIGHTS, count))]
        return [(self._slots[place], self._part(self._slots[place])) for place in places]

    def _part(self, slot: Slot) -> Tensor:
        flat = local_of(slot.live.detach()).reshape(-1)
        windows = max(1, -(-flat.numel() // WORDS))
        return flat[self._looks % windows * WORDS :][:WORDS]

    def judge(self, total: Sequence[float]) -> None:
        """total: what the words of all ranks add up to; equal numbers have the least sum of squares for their sum.

        Every rank calls it after the same look. Raises UserCodeError J28 if replicas differ by more than rounding."""
        total_sum, square = total
        looked, self._looks = self._parts(), self._looks + 1
        if square * self._dp.size != total_sum * total_sum:
            for slot, part in looked:
                self._compare(slot, part)

    @torch.no_grad()
    def _compare(self, slot: Slot, part: Tensor) -> None:
        if not part.numel():
            return
        rows = self._dp.all_gather(part.reshape(1, -1).contiguous()).view(self._dp.size, -1)
        wide = rows.double() if not rows.is_complex() else torch.view_as_real(rows).double()
        apart = (wide - wide[:1]).abs().flatten(1).amax(1)
        near = float(wide.abs().max()) * torch.finfo(rows.dtype).eps ** 0.5
        odd = [rank for rank, far in enumerate(apart.tolist()) if not far <= near]
        if odd:
            ranks = [self._dp.ranks[rank] for rank in odd]
            raise UserCodeError(
                f"replicas have parted: {slot.name} of {listed(ranks)} differs from rank {self._dp.ranks[0]}'s by up to"
                f" {max(apart.tolist()):.1e}",
                where="backward",
                likely="each rank made an update of its own: a rate, a choice or noise that follows its samples",
                fix="job.mean, job.ranks: one number for all ranks; unisono prove names the step and the gradient",
                code="J28",
            )


GLANCE = 512  # numbers of a gradient that say whether ranks have the same


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Have `act` called when the backward that is running has done everything else."""
    Variable._execution_engine.queue_callback(act)  # type: ignore[attr-defined]


def is_asked_for(p: nn.Parameter) -> bool:
    """Whether what is running is torch.autograd.grad, which returns gradients and leaves none."""
    try:
        torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(p).node)
    except RuntimeError:  # torch does not say it of a parameter otherwise
        return True
    return False


class Averaging(EveryStepSync):
    """Means over replicas instead of sums."""

    def grad_ready(self, bucket: Bucket) -> None:
        bucket.flat.mul_(1.0 / self.dp.size)
        super().grad_ready(bucket)


class LoopGradients:
    """Gradients of one model in a user's own loop, which meet on `dp`: a group of the model's own, since which of
    several models is ready first may differ from rank to rank. Parameters may be frozen and thawed at any time.
    over: called as a backward has ended. meet: called before ranks meet. exchange: of `dp`."""

    def __init__(
        self,
        slots: Sequence[Slot],
        dp: Group,
        shard: Group,
        current_batch: CurrentBatch,
        over: Callable[[], None],
        meet: Callable[[], None],
        exchange: ScalarExchange,
    ) -> None:
        self._every, self._dp, self._shard = tuple(slots), dp, shard
        self._batch, self._over, self._before = current_batch, over, meet
        self._meets, self._exchange = dp.size > 1, exchange
        # By parameter, the gradient that was left: where, and whether.
        self._met: dict[int, tuple[int, Any]] = {}
        self._alone = False  # whether ranks have been seen to make gradients of their own
        self._running = self._holding = self._behind = False
        several = self._meets or shard.size > 1
        self._hooks = [DeferredHooks(slot.live) for slot in (slots if several else ())]
        self._hooked: list[DeferredHooks] = []
        self._gradients = self._new_gradients()
        for slot in slots if self._meets and shard.size == 1 else ():
            trains = slot.live.requires_grad
            arrives = partial(self._arrives, slot.live)  # it stays where a parameter is frozen
            slot.live.requires_grad_(True).register_hook(arrives)
            slot.live.requires_grad_(trains)

    @property
    def slots(self) -> list[Slot]:
        """The slots of the parameters that are trained."""
        return self._gradients.slots

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the parameters that no rank's last backward reached."""
        return self._gradients.unused

    def hold(self, holding: bool) -> bool:
        """Switch whether backwards keep their gradients to themselves; returns what was."""
        was, self._holding = self._holding, holding
        return was

    def scatter_through(self, model: nn.Module) -> None:
        """Weigh what FSDP2 sends: its gradients never pass the parameters' own hooks."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(ShardScatter(self._shard, self._weigh))  # type: ignore[arg-type]

    def catch_up(self) -> None:
        """Let gradients meet that were held back; nothing if they have met."""
        if self._behind:
            self._gradients.arm()
            self._meet()

    @torch.no_grad()
    def meet_others(self, looking: bool) -> list[Tensor] | None:
        """Let gradients meet that no backward here has made, as those of torch.autograd.grad; returns them, None if all
        have met. Every rank calls it before a step. looking: whether to ask though all are those that a backward left.
        """
        if not self._meets:
            return None
        held = [(slot.live, slot.live.grad) for slot in self.slots if slot.live.grad is not None]
        fresh = [grad for live, grad in held if self._met.get(id(live), (0,))[0] != grad._cdata]
        if not (fresh or looking or self._alone) or self._same(self._held()):
            return None
        self._alone = True
        self._batch.update()
        for grad in self._held():
            if self._batch.ratio:
                grad.mul_(self._batch.ratio)
            else:
                grad.zero_()
        self._hooked = []
        self._gradients.arm()
        self._meet()
        return fresh or [grad for _, grad in held]

    def _held(self) -> list[Tensor]:
        return [local_of(slot.live.grad) for slot in self.slots if slot.live.grad is not None]

    @torch.no_grad()
    def _same(self, grads: Sequence[Tensor]) -> bool:
        """Whether replicas hold the same gradients, by a few numbers of each."""
        parts = [grad.reshape(-1)[:: max(1, grad.numel() // GLANCE)][:GLANCE] for grad in grads]
        glance = (
            torch.stack([checksum(part) for part in parts]).sum()
            if parts
            else torch.zeros((), dtype=torch.int64)
        )
        seen = self._exchange.gather(int(glance))
        return all(number == seen[0] for number in seen)

    def look_anew(self) -> bool:
        """Follow parameters that were frozen or thawed. Return whether there are some."""
        if len(self.slots) == sum(s.live.requires_grad for s in self._every) and all(
            slot.live.requires_grad for slot in self.slots
        ):
            return False
        gradients = [(slot.live, slot.live.grad) for slot in self._every]
        self._gradients.release()
        self._gradients = self._new_gradients()
        for live, gradient in gradients:
            live.grad = gradient
        return True

    def _new_gradients(self) -> Gradients:
        self._replicas = Replicas(self._every, self._dp)
        return Gradients(self._every, self._dp, Averaging(self._dp), places=LossPlaces(2, (0, 1)))

    def _arrives(self, live: nn.Parameter, grad: Tensor) -> Tensor | None:
        """One parameter's fresh gradient, before it is added to what is there."""
        if not self._running and is_asked_for(live):
            return None
        self._begin()
        ratio = self._batch.ratio
        if ratio == 1.0:
            return None
        return grad * ratio if ratio else torch.zeros_like(grad)  # 0 x inf is not 0

    def _weigh(self, grad: Tensor) -> None:
        """Gradients that FSDP2 is about to sum over the shards: this rank's weight applied."""
        self._begin()
        ratio = self._batch.ratio
        if ratio:
            grad.mul_(ratio / self._shard.size)
        else:
            grad.zero_()

    def _begin(self) -> None:
        """Begin a backward, as its first gradient arrives."""
        if self._running:
            return
        self._running = True
        # FSDP2 queues what it does at the end as well, perhaps behind this: so only then is the end queued.
        at_end_of_backward(lambda: at_end_of_backward(self._ended))
        self._batch.backward()
        self._hooked = begin_all(self._hooks)
        if not self._meets:
            return
        self.look_anew()
        if self._holds:
            self._behind = True
        else:
            self._gradients.arm()

    def _ended(self) -> None:
        self._running = False
        self._over()
        if not self._holds:
            self._meet()

    @property
    def _holds(self) -> bool:
        """Whether this backward's gradients stay here: not if hooks of the user's wait for them to meet."""
        return self._holding and not self._hooked

    @torch.no_grad()
    def _meet(self) -> None:
        self._behind = False
        self._before()
        if self._meets:
            self._close()
        hooked, self._hooked = self._hooked, []
        for hook in hooked:
            hook.end()
        if self._hooks:
            held = [(slot.live, slot.live.grad) for slot in self.slots if slot.live.grad is not None]
            self._met = {id(live): (grad._cdata, torch._C._WeakTensorRef(grad)) for live, grad in held}  # type: ignore[attr-defined]

    def _close(self) -> None:
        looks = self._replicas.due()
        self._gradients.close(self._replicas.words() if looks else None)
        self._gradients.drop_unused()
        for slot in self.slots:  # back to where the user's optimiser looks for them
            if slot.master is not slot.live and slot.master.grad is not None:
                if slot.live.grad is None:
                    slot.live.grad = torch.zeros_like(slot.live)
                local_of(slot.live.grad).copy_(slot.master.grad)
        if looks:
            self._replicas.judge(self._gradients.line.values[:2].tolist())
