"""The update: from a final gradient to new weights, and whether there is one at all."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from unisono.codecs import Coder
from unisono.codecs._moments import MomentCoder
from unisono.comm.device import has_fused
from unisono.config import TrainConfig
from unisono.parallel.params import Slot, values_of
from unisono.parallel.stochastic import Dither
from unisono.spec.errors import UsageError
from unisono.spec.finder import contributed
from unisono.spec.training import Optimiser
from unisono.sync import Verdict
from unisono.train.step.grad_norm import clip, excess
from unisono.train.step.numbers import Numbers, not_numbers
from unisono.train.step.padded_params import is_narrow, lanes, line_for, pair, row_for
from unisono.train.step.scaling import Unscaled
from unisono.train.step.several_optimizers import SeveralOptimizers

Around = Callable[[Coder], Coder]
NormsOver = Callable[..., Any]
"""(columns, slots by parameter) → what an optimiser that needs norms of whole tensors asks for them."""


def crossing_of(member: Optimiser, optimizer: Optimizer, slots: Sequence[Slot]) -> Around:
    """What is put around a codec that loses something. optimizer: the live one of `member`, on this rank."""
    decay = member.crossing
    if decay is None:
        return lambda coder: coder
    # Rows of tables are counted by themselves, and meet without a codec.
    masters = [slot.master for slot in slots if slot.live.requires_grad and not slot.lazy]

    def steps_made() -> int:
        """The optimiser's own counter, which a checkpoint brings along under any codec and any number of replicas."""
        counters = (optimizer.state.get(master, {}).get("step") for master in masters)
        return next(int(counter) for counter in counters if counter is not None)

    return lambda coder: MomentCoder(coder, decay, member.whole_steps, steps_made)


@dataclass(frozen=True, slots=True)
class Report:
    """What one step did. loss: nats per target over the global batch. norm: before clipping. verdict: DISCARD where
    nothing was changed. finite: whether loss and norm are numbers. again: they were not,
    and the step is played once more, with a smaller scale, before anyone may stop. bad: why the step was not to be
    made, "" where it was; then the run cannot go on, unless it was skipped: it counts, and changed nothing. says: what
    else there is to tell, by name."""

    step: int
    loss: float
    norm: float
    lr: float
    verdict: Verdict
    stop: bool = False
    finite: bool = True
    again: bool = False
    bad: str = ""
    skipped: bool = False
    says: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Update:
    """Learning rate, clipping and the optimiser of one rank.

    rate(step): the learning rate of a step. max_norm: what the gradient of the whole model is clipped to; 0: off.
    scaler: of the losses. dither: how parameters without masters are rounded. crossing: puts around a codec that loses
    something what this optimiser has it given. apart: whether each parameter is stepped by its own gradient alone.
    lag: steps from a gradient to its update. by_parts: whether parts of the model may be updated later than others.
    judge(step, verdict, numbers): why a step is not to be made, in words, "" where it is; from what all ranks have
    alike. after(verdict): what else follows from the whole step on all ranks, each; returns what there is to tell.
    observe(numbers): hears of a step before its learning rate is read. keeps: what it knows between steps, tensors of
    no dims, by name in checkpoints; the same on all ranks.
    optimizer_over(slots): the same optimiser, at its beginning, over other tensors. gathers: see `Optimiser`.
    averages: of the weights over updates, by a slot's name, each like its master; as `ema/NAME` in checkpoints.
    validates_averages: whether validations use them.
    """

    by_parts: ClassVar[bool] = False
    optimizer: Optimizer
    slots: Sequence[Slot]
    rate: Callable[[int], float]
    max_norm: float
    scaler: Unscaled = field(default_factory=Unscaled)
    dither: Dither = field(default_factory=partial(Dither, 0))
    crossing: Around = lambda coder: coder
    apart: bool = False
    lag: int = 0
    judge: Callable[[int, Verdict, Numbers], str] = not_numbers
    after: tuple[Callable[[Verdict], Mapping[str, Any]], ...] = ()
    observe: Callable[[Numbers], None] | None = None
    keeps: Mapping[str, torch.Tensor] = field(default_factory=dict)
    optimizer_over: Callable[[Sequence[Slot]], Optimizer] | None = None
    gathers: bool = False
    averages: Mapping[str, torch.Tensor] = field(default_factory=dict)
    validates_averages: bool = False

    def __call__(self, step: int, verdict: Verdict, numbers: Numbers) -> Report:
        """Make the update of step `step`, if its gradient is to be applied here and is one of numbers. Every rank calls
        it where something follows, or it hangs."""
        finite = math.isfinite(numbers.loss) and math.isfinite(numbers.norm)
        again = self.scaler.overflowed(finite)
        # What only this replica knows is judged at the next meeting; until then its own bad step is left out.
        bad = "" if again or not numbers.met else self.judge(step, verdict, numbers.alike)
        if bad or not finite:
            verdict = Verdict.DISCARD
        if self.observe is not None and verdict is Verdict.APPLY:
            self.observe(numbers)
        lr = self._rate(step)
        if verdict is Verdict.APPLY:
            self.make(step, numbers.norm)
        stop, says = numbers.stop and not again, dict[str, Any](self.scaler.says())
        for follow in self.after:
            says.update(follow(verdict))
        finite = finite or again
        return Report(step, numbers.loss, numbers.norm, lr, verdict, stop, finite, again, bad, says=says)

    def make(self, step: int, norm: float) -> None:
        """The update itself. step: in which it is made, at the learning rate of its gradient's. A gradient that is not
        one of numbers changes nothing."""
        if math.isfinite(norm):
            set_rate(self.optimizer, self._rate(step))
            self.dither.step = step
            clip_and_step(self.optimizer, self.slots, norm, self.max_norm)

    def _rate(self, step: int) -> float:
        return self.rate(max(0, step - self.lag))


def update_of(
    train: TrainConfig,
    slots: Sequence[Slot],
    device: torch.device,
    even: bool = False,
    scaler: Unscaled | None = None,
    dither: Dither | None = None,
    norms: NormsOver | None = None,
) -> Update:
    """The recipe's update over the local tensors of a rank's slots; even, norms: see `make`."""
    dither = dither or Dither(0)
    optimizer = make(train, slots, device, even=even, dither=dither, norms=norms, shared=True)
    member = train.optimiser()
    crossing, scaler = crossing_of(member, optimizer, slots), scaler or Unscaled()
    over = partial(make, train, device=device, even=even, dither=dither)
    return Update(
        optimizer,
        slots,
        train.rate(),
        train.clip,
        scaler,
        dither,
        crossing,
        member.apart,
        optimizer_over=over,
        gathers=member.gathers,
    )


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def make(
    train: TrainConfig,
    slots: Sequence[Slot],
    device: torch.device,
    even: bool = False,
    dither: Dither | None = None,
    norms: NormsOver | None = None,
    shared: bool = False,
) -> Optimizer:
    """The recipe's optimiser, or several that act as one; matrices decay, vectors do not, as in GPT-2.

    Every state tensor exists from the start, so that a checkpoint can be loaded into it. even: give each element the
    same bits wherever a tensor is cut (see `line_for`). dither: rounds what has no master. norms: over ranks that hold
    parts of tensors; None: each is whole here. shared: whoever calls it divides steps of whole matrices over ranks
    afterwards (`owners.py`), so that a rank may hold parts of them.
    """
    learning, chosen = _learning(slots), train.optimiser()
    members = {s.master: chosen.for_parameter(s.name, s.shape) for s in learning}
    _refuse_parts(learning, members, norms is not None, shared)
    ragged = [
        s
        for s in learning
        if not (s.lazy or members[s.master].whole or members[s.master].norms)
        and (is_narrow(s.master) or (even and s.master.numel() % lanes(s.master)))
    ]
    pairs = {s.master: line_for(s.master) for s in ragged}
    lazy = {s.master: row_for(s.master) for s in learning if s.lazy}
    stand_ins = pairs | lazy
    fused, lives = train.fused and has_fused(device), []
    # A frozen stage has none. Where ranks add up norms, each has to take part.
    always = [chosen] if chosen.norms or not members else []
    for member in dict.fromkeys((*members.values(), *always)):
        stepped = {s.master: s for s in learning if members[s.master] == member}
        groups = _groups(stepped.values(), stand_ins, train.weight_decay)
        lives.append(member.bind(groups, train.peak_lr, fused))
        if not (shared and member.with_owner):
            for parameter in (p for group in groups for p in group["params"]):
                lives[-1].state[parameter] = member.state(parameter)
        if norms is not None and member.norms:
            lives[-1].norms = norms(lives[-1].columns(), slots=stepped)
    optimizer = lives[0] if len(lives) == 1 else SeveralOptimizers(lives)
    if pairs:
        slot_of = {slot.master: slot for slot in ragged}
        pair(optimizer, pairs, lambda master, x: (dither or Dither(0)).kept(slot_of[master], x))
    for master in lazy:
        optimizer.state[master] = members[master].state(master)
    if lazy:
        contributed("unisono.train.step.lazy").step_rows(optimizer, lazy, lanes(next(iter(lazy))))
    # Fused kernels change parameters without a word, by which what is rounded from a master would know (`masters.py`).
    apart = [s.master for s in learning if s.master is not s.live]
    optimizer.register_step_post_hook(lambda *_: increment_version(apart))
    return optimizer


def _groups(
    slots: Collection[Slot], stand_ins: Mapping[nn.Parameter, nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Parameters that decay, and those that do not; a group without any is left out where the other has some."""
    groups = [
        {
            "params": [stand_ins.get(s.master, s.master) for s in slots if (len(s.shape) >= 2) == matrix],
            "weight_decay": weight_decay if matrix else 0.0,
        }
        for matrix in (True, False)
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def _learning(slots: Sequence[Slot]) -> list[Slot]:
    """The slots that are stepped. An alias whose owner lies on this rank shares its storage, and must not be stepped
    twice."""
    owned = {s.master.data_ptr() for s in slots if not s.alias}
    return [s for s in slots if s.live.requires_grad and not (s.alias and s.master.data_ptr() in owned)]


def _refuse_parts(
    slots: Sequence[Slot], members: Mapping[nn.Parameter, Optimiser], norms_over_ranks: bool, shared: bool
) -> None:
    """Raises UsageError where an optimiser that needs whole tensors, or norms of these, is to step a part of one that
    nobody gathers."""
    for slot in slots:
        member = members[slot.master]
        together = (shared and member.gathers) or (norms_over_ranks and member.norms)
        part = tuple(slot.master.shape) != slot.shape and not together
        odd = part or is_narrow(slot.master) or (member.norms and slot.lazy)
        if (member.whole or member.norms) and odd:
            here, full = list(slot.master.shape), list(slot.shape)
            what = f"optimizer={member.name} needs the whole of {slot.name} {full} in the gradient's dtype"
            rows = "its rows are stepped when they are read"
            raise UsageError(
                f"{what}, and {rows if slot.lazy else f'a rank holds {here} in {slot.master.dtype}'}",
                where="plan, train.optimizer",
                fix="a plan that does not cut it, or --train.optimizer adamw",
                code="P28",
            )


def state_of(optimizer: Optimizer, master: nn.Parameter) -> dict[str, torch.Tensor]:
    """The optimiser's tensors for one parameter; empty if it does not step it."""
    return {k: v for k, v in optimizer.state.get(master, {}).items() if isinstance(v, torch.Tensor)}


def held_for_all(optimizer: Optimizer, master: nn.Parameter) -> bool | None:
    """None where a rank keeps the optimiser's state of its own part of a parameter. Else this state is of the whole
    one, and lies with its owner: True where no other replica has it."""
    owned = [getattr(part, "owned", {}) for part in getattr(optimizer, "parts", (optimizer,))]
    return next((of_part[master] for of_part in owned if master in of_part), None)


def clip_and_step(optimizer: Optimizer, slots: Sequence[Slot], norm: float, limit: float) -> None:
    """Clip, then step, to the last bit as `clip` and the optimiser do; a fused optimiser divides while it has the
    gradients in its registers, and they need not be gone through twice. Either way the gradients are clipped
    afterwards."""
    grads = [values_of(s.master.grad) for s in slots if s.master.grad is not None]
    fused = optimizer.defaults.get("fused") and all(g.dtype == torch.float32 for g in grads)
    if not limit or norm <= limit or not fused or not grads:
        clip(slots, norm, limit)
        optimizer.step()
        return
    # Filled there: a number that is copied to a GPU is waited for.
    optimizer.grad_scale = torch.full((), excess(norm, limit), device=grads[0].device)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
