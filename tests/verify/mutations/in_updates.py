"""The optimiser's step on each rank's part."""

import math

import torch

from tests.verify.mutations.in_data import rank
from tests.verify.mutations.planting import bug
from unisono.config import TrainConfig
from unisono.train.step import update
from unisono.train.step.grad_norm import ByTensor

MAKE, SET_RATE, RATE = update.make, update.set_rate, TrainConfig.rate


def after(change):
    """make, with `change(optimizer)` called after every step."""

    def make(train, slots, device, **more):
        optimizer = MAKE(train, slots, device, **more)
        plain = optimizer.step

        def stepped():
            plain()
            with torch.no_grad():
                change(optimizer)

        optimizer.step = stepped
        return optimizer

    return make


def before(change):
    """make, with `change(optimizer)` called before every step."""

    def make(train, slots, device, **more):
        optimizer = MAKE(train, slots, device, **more)
        plain = optimizer.step

        def stepped():
            with torch.no_grad():
                change(optimizer)
            plain()

        optimizer.step = stepped
        return optimizer

    return make


def with_groups(**values):
    """make, with values set in all parameter groups."""

    def make(train, slots, device, **more):
        optimizer = MAKE(train, slots, device, **more)
        for group in optimizer.param_groups:
            group.update(values)
        return optimizer

    return make


def by_hand(formula):
    """make, with AdamW written by hand: formula(p, m, v, t, group) moves p."""

    def make(train, slots, device, **more):
        optimizer = MAKE(train, slots, device, **more)

        @torch.no_grad()
        def stepped():
            for group in optimizer.param_groups:
                b1, b2 = group["betas"]
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = optimizer.state[p]
                    state["step"] += 1
                    state["exp_avg"].lerp_(p.grad, 1 - b1)
                    state["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    formula(p, state["exp_avg"], state["exp_avg_sq"], state["step"].item(), group)

        optimizer.step = stepped
        return optimizer

    return make


def params(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


# Rates and decay ------------------------------------------------------------------------------------------------


@bug("dp=2", "learning_rate")
def rate_scaled_by_world(patch):
    """The learning rate is multiplied by the number of ranks behind the user's back."""
    patch(update, "set_rate", lambda optimizer, lr: SET_RATE(optimizer, 2 * lr))


@bug("dp=2", "learning_rate")
def schedule_counts_per_rank(patch):
    """The schedule advances once for each process instead of once for each step."""
    patch(TrainConfig, "rate", lambda self: lambda at: RATE(self)(2 * at + 1))


@bug("dp=2", "weight_decay")
def decay_on_norms(patch):
    """Weight decay on vectors too."""
    patch(update, "make", with_groups(weight_decay=0.1))


@bug("shard=2", "weight_decay")
def no_decay_on_flat_shards(patch):
    """A flattened shard has one dim, and dims decide what decays."""
    patch(update, "make", with_groups(weight_decay=0.0))


@bug("dp=2", "weight_decay", "learning_rate", optimizer="sgd")
def decay_in_sgd_doubled(patch):
    """Decay in the optimiser and in the loss."""
    patch(update, "make", with_groups(weight_decay=0.2))


@bug("dp=2", "moments", optimizer="sgd")
def momentum_of_another_value(patch):
    """The momentum of a default, not of the recipe."""
    patch(update, "make", with_groups(momentum=0.5))


# Adam -----------------------------------------------------------------------------------------------------------


@bug("dp=2", "step_count")
def steps_counted_per_micro_batch(patch):
    """The optimiser counts micro-batches, so bias correction ends too early."""

    def count(optimizer):
        for p in params(optimizer):
            optimizer.state[p]["step"] += 3

    patch(update, "make", before(count))


@bug("dp=2", "step_count")
def stepped_twice(patch):
    """Both the framework and the user call step."""

    def make(train, slots, device, **more):
        optimizer = MAKE(train, slots, device, **more)
        plain = optimizer.step
        optimizer.step = lambda: (plain(), plain())
        return optimizer

    patch(update, "make", make)


@bug("dp=2", "update_rule")
def eps_inside_the_root(patch):
    """sqrt(v + eps) instead of sqrt(v) + eps."""

    def formula(p, m, v, t, group):
        b1, b2 = group["betas"]
        p.addcdiv_(m, (v / (1 - b2**t) + group["eps"]).sqrt(), value=-group["lr"] / (1 - b1**t))

    patch(update, "make", by_hand(formula))


@bug("dp=2", "learning_rate", "update_rule")
def no_bias_correction(patch):
    """The moments are used as if they had always been averaged."""

    def formula(p, m, v, t, group):
        p.addcdiv_(m, v.sqrt() + group["eps"], value=-group["lr"])

    patch(update, "make", by_hand(formula))


@bug("dp=2", "moments")
def betas_exchanged(patch):
    """The two decays in the wrong order."""
    patch(update, "make", with_groups(betas=(0.95, 0.9)))


@bug("shard=2", "moments")
def moments_forgotten(patch):
    """The optimiser's state is made anew after each resharding."""

    def forget(optimizer):
        for p in params(optimizer):
            optimizer.state[p]["exp_avg"].zero_()

    patch(update, "make", before(forget))


@bug("shard=2", "moments")
def moments_of_the_neighbour(patch):
    """A shard's state is loaded in another order than its parameters."""

    def roll(optimizer):
        for p in params(optimizer):
            m = optimizer.state[p]["exp_avg"]
            m.copy_(m.flatten().roll(1).view_as(m))

    patch(update, "make", before(roll))


@bug("dp=2", "weight_decay")
def coupled_decay(patch):
    """Adam with decay in the gradient instead of AdamW."""

    def make(train, slots, device, **more):
        optimizer = MAKE(train, slots, device, **more)
        plain = optimizer.step

        @torch.no_grad()
        def stepped():
            kept = [(p, p.grad) for p in params(optimizer)]
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
            for p, grad in kept:
                p.grad = grad.add(p, alpha=0.1 if p.dim() > 1 else 0.0)
            plain()
            for p, grad in kept:  # as torch's own coupled decay leaves it
                p.grad = grad

        optimizer.step = stepped
        return optimizer

    patch(update, "make", make)


# Copies ---------------------------------------------------------------------------------------------------------


@bug("dp=2", "replicas_drifted")
def replicas_updated_differently(patch):
    """Equal gradients, and an update that is not the same on every replica."""

    def drift(optimizer):
        params(optimizer)[2].mul_(1 + 1e-12 * rank())

    patch(update, "make", after(drift))


@bug("tp=2", "replicas_drifted")
def whole_tensors_drift_over_tp(patch):
    """A norm's weight that tensor-parallel ranks should hold alike drifts apart."""

    def drift(optimizer):
        next(p for p in params(optimizer) if p.dim() == 1).add_(1e-10 * rank())

    patch(update, "make", after(drift))


@bug("pp=2", "tied_copies_differ")
def second_stage_does_not_step_its_tie(patch):
    """The last stage's copy of the embedding is left out of its optimiser."""
    patch(
        update,
        "make",
        lambda train, slots, device, **more: MAKE(train, [s for s in slots if not s.alias], device, **more),
    )


@bug("dp=2", "not_updated")
def a_tensor_is_left_out(patch):
    """A parameter that no group holds: it never moves."""

    def make(train, slots, device, **more):
        return MAKE(train, [s for s in slots if s.name != "blocks.1.mlp.up.weight"], device, **more)

    patch(update, "make", make)


@bug("pp=2", "precision_lost")
def master_weights_in_single(patch):
    """Weights pass through float32 after each update."""

    def single(optimizer):
        for p in params(optimizer):
            p.copy_(p.float())

    patch(update, "make", after(single))


@bug("dp=2", "update_rule", "few_elements")
def one_weight_off_by_a_billionth(patch):
    """A flipped bit in one weight: 1e-9 of its tensor's largest entry."""

    def flip(optimizer):
        p = params(optimizer)[1]
        p.view(-1)[3] += 1e-9 * p.abs().max()

    patch(update, "make", after(flip))


@bug("shard=2 zero=3", "update_rule", "few_elements", "moments")
def one_moment_off_by_a_billionth(patch):
    """A flipped bit in a second moment: 1e-9 of its tensor's largest entry."""

    def flip(optimizer):
        v = optimizer.state[params(optimizer)[1]]["exp_avg_sq"]
        v.view(-1)[3] += 1e-9 * v.abs().max()

    patch(update, "make", after(flip))


@bug("dp=2", "not_a_number")
def square_root_of_a_negative_norm(patch):
    """A norm that is not a number lets the step be skipped in silence."""
    call = ByTensor.__call__
    patch(ByTensor, "__call__", lambda self, slots, extra: [math.nan, *call(self, slots, extra)[1:]])
