"""Why weights moved otherwise than on one device: plays the step again with one mistake each, until one fits.

All before the step is right, so one device goes up to it, and each suspect begins there.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer

from unisono.spec.words import listed
from unisono.verify.evidence import Cause, factor, fit, size_text
from unisono_contrib.library.stacks._one_device import (
    GlobalBatch,
    OneDevice,
    added,
    clipped_share,
    multiplied,
    other_means,
    scaled,
)
from unisono_contrib.library.stacks._step import TrainingStep, trainable

Tensors = Mapping[str, Tensor]
Suspect = tuple[Cause, Callable[[OneDevice], None]]
KINDS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax")


class UpdateCase:
    """One wrong update. device: one device before it. wrong: names of the weights. near: the error up to which weights
    are alike, over the largest movement. ranks: each rank's weights after it."""

    def __init__(self, step: TrainingStep, argument: Mapping[str, Any]) -> None:
        self.device = OneDevice(step, argument["groups"], argument["micros"])
        for number in range(argument["at"]):
            self.device.update(added(self.device.shares(self.device.batch(number))))
        self.at, self.near = argument["at"], min(0.1, max(1e-7, 10 * argument["near"]))
        self.wrong: Sequence[str] = argument["wrong"]
        folder, count = Path(argument["folder"]), argument["processes"]
        self.ranks = [load_file(folder / f"weight-{rank}-{self.at}") for rank in range(count)]
        self.groups, self.micros = argument["groups"], argument["micros"]
        self.batch = self.device.batch(self.at)
        self.shares = self.device.shares(self.batch)
        self.gradient = added(self.shares)
        self.before = self.device.weights()
        right = self.device.copy()
        right.update(self.gradient)
        self.after = right.weights()

    @property
    def sizes(self) -> dict[str, int]:
        """What a wrong factor may be equal to, in words."""
        both = self.groups * self.micros
        return {
            "the ranks": self.groups,
            "the micro-batches of a rank": self.micros,
            "all micro-batches": both,
        }

    def move(self, weights: Tensors, name: str) -> Tensor:
        """How far a tensor went in this step."""
        return (weights[name].double() - self.before[name].double()).flatten()

    def distance(self, rank: int, weights: Tensors) -> float:
        """How far what a rank has in place of the wrong weights is from these, over the largest movement."""
        far = 0.0
        for name in self.wrong:
            got, want = self.move(self.ranks[rank], name), self.move(weights, name)
            top = max(want.abs().max().item(), self.move(self.after, name).abs().max().item())
            gap = (got - want).abs().max().item() - self.rounding(name)
            far = max(far, gap / top if top else math.inf)
        return far

    def rounding(self, name: str) -> float:
        """How much a weight of this size is rounded."""
        weight = self.before[name]
        return 16 * torch.finfo(weight.dtype).eps * weight.abs().max().item()

    def is_like(self, rank: int, weights: Tensors) -> bool:
        """Whether what a rank has in place of the wrong weights are these."""
        return self.distance(rank, weights) <= self.near

    def played(self, act: Callable[[OneDevice], None]) -> dict[str, Tensor]:
        """The weights after a suspect's step."""
        device = self.device.copy()
        act(device)
        return device.weights()


def cause_of_update(step: TrainingStep, argument: Mapping[str, Any]) -> Cause:
    """Return the likely cause of an update that is wrong though all before it is right."""
    case = UpdateCase(step, argument)
    for find in (_not_a_number, _apart, _still, _played_again, _scaled, _other_kind):
        cause = find(case)
        if cause is not None:
            return cause
    text = f"what is done to {listed(case.wrong, 3)} is in no pattern known here"
    return Cause("update_rule", text)


def _not_a_number(case: UpdateCase) -> Cause | None:
    bad = [name for name in case.wrong if not all(bool(held[name].isfinite().all()) for held in case.ranks)]
    return Cause("not_a_number", f"an entry of {bad[0]} is not a number after the update") if bad else None


def _apart(case: UpdateCase) -> Cause | None:
    """Ranks hold different weights."""
    first = case.ranks[0]
    apart = [
        name for name in case.wrong if not all(torch.equal(first[name], held[name]) for held in case.ranks)
    ]
    if not apart:
        return None
    size = case.micros
    for scale in (case.groups, 1):
        alone = [
            case.played(
                lambda device, r=rank, k=scale: device.update(
                    multiplied(added(case.shares[r * size :][:size]), k)
                )
            )
            for rank in range(case.groups)
        ]
        if len(alone) == len(case.ranks) and all(case.is_like(rank, held) for rank, held in enumerate(alone)):
            text = f"each rank updates {listed(apart, 3)} by the gradient of its own micro-batches alone"
            return Cause("not_reduced", text)
    good = [rank for rank in range(len(case.ranks)) if case.is_like(rank, case.after)]
    where = f"; right on ranks {listed(good)}" if good else ""
    return Cause(
        "replicas_drifted", f"ranks hold different weights of {listed(apart, 3)} after the update{where}"
    )


def _still(case: UpdateCase) -> Cause | None:
    still = [name for name in case.wrong if not bool(case.move(case.ranks[0], name).any())]
    if len(still) < len(case.wrong) or not still:
        return None
    return Cause("not_updated", f"{listed(still, 3)} did not move in this step")


# Suspects ------------------------------------------------------------------------------------------------------------


def _played_again(case: UpdateCase) -> Cause | None:
    """The first of the suspects that come as near as any does."""
    tried = [(cause, case.distance(0, case.played(act))) for cause, act in _suspects(case)]
    best = min((far for _, far in tried), default=math.inf)
    if best > case.near:
        return None
    return next(cause for cause, far in tried if far <= max(2 * best, 1e-2 * case.near))


def _suspects(case: UpdateCase) -> Iterator[Suspect]:
    """Steps with one mistake each, the most common first; those that change nothing are not among them."""
    yield from _of_calls(case)
    yield from _of_options(case)
    yield from _of_clipping(case)
    yield from _of_shares(case)
    yield from _of_factors(case)


def _of_calls(case: UpdateCase) -> Iterator[Suspect]:
    if case.micros == 1:
        return
    for scale, what in ((case.micros, "its mean"), (1, "its part")):
        for kept in (False, True):
            text = f"the optimiser steps {case.micros} times, after each micro-batch by {what}"
            more = ", and gradients are not forgotten in between" if kept else ""
            yield (
                Cause("steps_per_micro_batch", f"{text}{more}, where one device steps once"),
                lambda device, k=scale, keep=kept: _each_micro_batch(case, device, k, keep),
            )


def _each_micro_batch(case: UpdateCase, device: OneDevice, scale: int, kept: bool) -> None:
    """A step of the optimiser after each micro-batch, over all ranks."""
    past: list[dict[str, Tensor]] = []
    for micro in range(case.micros):
        at = range(micro, case.groups * case.micros, case.micros)
        batch = GlobalBatch([case.batch.batches[i] for i in at], [case.batch.parts[i] for i in at])
        shares = device.shares(batch)
        past = [*past, *shares] if kept else shares
        device.update(multiplied(added(past), scale))


def _of_options(case: UpdateCase) -> Iterator[Suspect]:
    groups = case.device.optimizer.param_groups
    decays = sorted({group.get("weight_decay", 0.0) for group in groups} - {0.0})
    if decays:
        text = f"weights do not decay, the optimiser's weight_decay is {listed([f'{d:g}' for d in decays])}"
        yield Cause("weight_decay", text), _with(case, weight_decay=0.0)
        for k in (2.0, float(case.groups), float(case.micros), 1 / case.groups, 1 / case.micros):
            if k != 1:
                act = _scaled_option(case, "weight_decay", k)
                yield Cause("weight_decay", f"weights decay {k:g} times as much as weight_decay says"), act
    if any(group.get("momentum") for group in groups) and case.at:
        yield Cause("momentum", "the optimiser steps without the momentum of its past"), _forgetful(case)
    elif case.at and case.device.optimizer.state:
        yield Cause("moments", "the optimiser has forgotten its state of the steps before"), _forgetful(case)
    if any(group.get("nesterov") for group in groups):
        yield (
            Cause("momentum", "momentum is not Nesterov's, as the optimiser says"),
            _with(case, nesterov=False),
        )
    elif any(group.get("momentum") for group in groups):
        yield (
            Cause("momentum", "momentum is Nesterov's, and the optimiser's is not"),
            _with(case, nesterov=True, dampening=0.0),
        )


def _with(case: UpdateCase, **options: Any) -> Callable[[OneDevice], None]:
    def act(device: OneDevice) -> None:
        for group in device.optimizer.param_groups:
            group.update({key: value for key, value in options.items() if key in group})
        device.update(case.gradient)

    return act


def _scaled_option(case: UpdateCase, key: str, by: float) -> Callable[[OneDevice], None]:
    def act(device: OneDevice) -> None:
        for group in device.optimizer.param_groups:
            group[key] = by * group.get(key, 0.0)
        device.update(case.gradient)

    return act


def _forgetful(case: UpdateCase) -> Callable[[OneDevice], None]:
    def act(device: OneDevice) -> None:
        device.optimizer.state.clear()
        device.update(case.gradient)

    return act


def _of_clipping(case: UpdateCase) -> Iterator[Suspect]:
    clip = case.device.step.clip
    if not clip:
        return
    yield (
        Cause("not_clipped", f"gradients are not clipped to {clip:g}"),
        lambda d: d.update(case.gradient, 0.0),
    )
    many = case.groups * case.micros
    for k, what in (
        (case.groups, "of a sum over ranks, which is divided afterwards"), (case.micros, "of a sum over micro-batches"),
        (many, "of a sum over all micro-batches"),
    ):  # fmt: skip
        for times in (float(k), 1 / k):
            text = f"gradients are clipped to {clip * times:g}, not {clip:g}: as the norm {what}"
            yield Cause("clipping", text), lambda device, t=times: device.update(case.gradient, clip * t)
    size = case.micros
    yield (
        Cause("clipping", "each rank clips by the norm of its own gradient, before ranks meet"),
        lambda device: device.update(
            added([_clipped(multiplied(added(case.shares[r * size :][:size]), case.groups), clip, 1 / case.groups)
                   for r in range(case.groups)]), 0.0),
    )  # fmt: skip
    yield (
        Cause("clipping", "each micro-batch's gradient is clipped, in the place of their sum"),
        lambda device: device.update(
            added([_clipped(multiplied(s, many), clip, 1 / many) for s in case.shares]), 0.0
        ),
    )


def _clipped(gradient: Tensors, clip: float, times: float) -> dict[str, Tensor]:
    return multiplied(gradient, times * clipped_share([gradient], clip))


def _of_shares(case: UpdateCase) -> Iterator[Suspect]:
    """Micro-batches that are missing from the gradient, or are there more than once."""
    size, many = case.micros, len(case.shares)
    sets = {
        "all but the last micro-batch of each rank are lost": [i for i in range(many) if i % size == size - 1],
        "all but the first micro-batch of each rank are lost": [i for i in range(many) if i % size == 0],
    } if size > 1 else {}  # fmt: skip
    for rank in range(case.groups if case.groups > 1 else 0):
        sets[f"all that rank {rank} should add is missing"] = [i for i in range(many) if i // size != rank]
    for lost in range(many if many > 1 else 0):
        sets[f"micro-batch {lost} of the batch is missing"] = [i for i in range(many) if i != lost]
    for text, kept in sets.items():
        name = "missing_share" if "rank" in text and "each" not in text else "missing_micro_batch"
        for scale in (1.0, many / len(kept)):
            yield (
                Cause(name, f"in the gradient {text}"),
                lambda d, k=kept, s=scale: d.update(multiplied(added([case.shares[i] for i in k]), s)),
            )
    for twice in range(many):
        extra = [*case.shares, case.shares[twice]]
        text = f"in the gradient micro-batch {twice} of the batch counts 2 times"
        yield Cause("counted_twice", text), lambda device, x=extra: device.update(added(x))
    for text, times in other_means(case.batch.parts, size).items():
        other = scaled(case.shares, times)
        yield Cause("loss_normalisation", text), lambda device, x=other: device.update(added(x))


def _of_factors(case: UpdateCase) -> Iterator[Suspect]:
    for size in dict.fromkeys(case.sizes.values()):
        for k in (float(size), 1 / size):
            if size > 1:
                yield (
                    factor("the gradient that the optimiser is given is", k, case.sizes),
                    lambda device, times=k: device.update(multiplied(case.gradient, times)),
                )


# Formulas ------------------------------------------------------------------------------------------------------------


def _scaled(case: UpdateCase) -> Cause | None:
    """All that is wrong went a number of times as far, or decays otherwise."""
    pairs = _fits(case, case.after)
    if not pairs:
        return None
    (a, pull), scale = pairs[0], 1.0
    if not all(math.isclose(other, a, rel_tol=1e-3) for other, _ in pairs):
        return None
    if a < 0:
        text = f"{listed(case.wrong, 3)} moved {a:.6g} times as far as it should, which is the other way"
        return Cause("reversed", f"{text}: a sign is wrong")
    if abs(a - 1) > 1e-3:
        near = size_text(a, case.sizes)
        near = f", as many as {near}" if near else ""
        text = f"{listed(case.wrong, 3)} moved {a:.6g} times as far as it should{near}"
        return Cause("learning_rate", f"{text}: another learning rate, or gradients times a number")
    rate = next((group["lr"] for group in case.device.optimizer.param_groups if "lr" in group), scale)
    decay = -pull / float(rate)
    return Cause("weight_decay", f"weights decay by {decay:+.6g} more than the optimiser's weight_decay says")


def _other_kind(case: UpdateCase) -> Cause | None:
    """What is wrong moved as another optimiser moves it."""
    groups = case.device.optimizer.param_groups
    held = type(case.device.optimizer).__name__
    for kind in KINDS:
        if kind == held:
            continue

        def act(device: OneDevice, kind: str = kind) -> None:
            params = trainable(device.model)
            rate = float(groups[0].get("lr", 1e-3)) or 1e-3
            other: Optimizer = getattr(torch.optim, kind)(list(params.values()), lr=rate, weight_decay=0.0)
            device.optimizer = other
            device.update(case.gradient)

        if _fits(case, case.played(act)):
            what = "the gradient times one number" if kind == "SGD" else f"a first step of {kind}"
            text = f"{listed(case.wrong, 3)} moves by {what}, not by the step of {held}"
            return Cause(f"optimizer_is_{kind.lower()}", text)
    return None


def _fits(case: UpdateCase, like: Tensors) -> list[tuple[float, float]]:
    """(a, b) of each wrong tensor that went a times as far as in `like`, plus b times itself; [] where one did not."""
    pairs = []
    for name in case.wrong:
        got, move, weight = (
            case.move(case.ranks[0], name),
            case.move(like, name),
            case.before[name].double().flatten(),
        )
        columns = [x for x in (move, weight) if bool(x.any())]
        solution = fit(got, torch.stack(columns, 1)) if columns and bool(move.any()) else None
        if solution is None:
            if len(got) >= 4 or not bool(move.any()):
                return []
            continue  # too few numbers to say
        top = got.abs().max().item() or 1e-300
        fitted = sum((w * x for w, x in zip(solution.weights, columns, strict=True)), torch.zeros_like(got))
        room = min(0.02, 10 * case.near) * top + case.rounding(name)
        if not (got - fitted).abs().max().item() <= room:
            return []
        pairs.append((solution.weights[0], solution.weights[1] if len(columns) > 1 else 0.0))
    return pairs
