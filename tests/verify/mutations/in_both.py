"""What plan and one device do alike by definition, so that `verify` cannot see it: a quick test has to. `test` is one
that fails while the bug is there."""

import re
from dataclasses import replace

import torch

from tests.verify.mutations.planting import Patch, bug
from unisono.models import init
from unisono.models.gpt import net
from unisono.models.noise import Dropout
from unisono.parallel.stochastic import Dither
from unisono.spec.training import LearningRate
from unisono.train.data.dataset import TokenWindows
from unisono.train.data.feed import Permuted
from unisono.train.state.checkpoint.saver import Saver

AT, ATTEND, DRAW, FETCH = LearningRate.at, net.Core.attend, init.draw, Permuted.fetch
DRAWS, DROP, RULES, WINDOWS = Dither._draws, Dropout.forward, net.GPT.initial_rules, TokenWindows.fetch
PLAIN = "train/test_plain.py::test_five_steps_are_those_of_a_plain_loop"


@bug(test=PLAIN)
def a08_cosine_one_step_too_long(patch: Patch):
    """The schedule reaches its end one step after the last."""
    patch(LearningRate, "at", lambda self, step, steps, lr: AT(self, step, steps + 1, lr))


@bug(test=PLAIN)
def a09_warm_up_from_zero(patch: Patch):
    """The first step has a rate of zero."""

    def at(self, step, steps, lr):
        return lr * step / self.warmup_steps if step < self.warmup_steps else AT(self, step, steps, lr)

    patch(LearningRate, "at", at)


@bug(test="models/test_gpt.py::test_explicit_attention_with_dropout_equals_the_fused_kernel_without")
def a17_causal_mask_off_by_one_with_dropout(patch: Patch):
    """With dropout a position sees the next one."""

    def attend(self, q, k, v, noise):
        ones = torch.ones
        try:
            torch.ones = lambda *sizes, **more: ones(*sizes, **more).triu(2)
            return ATTEND(self, q, k, v, noise)
        finally:
            torch.ones = ones

    patch(net.Core, "attend", attend)


@bug(test="models/test_gpt.py::test_no_two_layers_begin_alike")
def a23_layers_drawn_alike(patch: Patch):
    """A layer's number is not part of what its weights are drawn from."""
    patch(init, "draw", lambda name, *rest: DRAW(re.sub(r"[0-9]+", "0", name), *rest))


@bug(test="models/test_gpt.py::test_initialisation_is_gpt2s")
def a24_residual_projections_not_scaled(patch: Patch):
    """Projections into the residual stream are drawn like all others."""

    def rules(self):
        return {name: (kind, 0.02 if kind == "normal" else 0.0) for name, (kind, _) in RULES(self).items()}

    patch(net.GPT, "initial_rules", rules)


@bug(test=PLAIN)
def a34_targets_not_shifted(patch: Patch):
    """The model learns to repeat its input."""
    patch(TokenWindows, "fetch", lambda self, indices: WINDOWS(self, indices)[:1] * 2)


@bug(test="models/test_noise.py::test_scaling_keeps_the_mean_and_no_noise_means_no_dropout")
def a35_dropout_not_scaled(patch: Patch):
    """What is kept is not made larger."""
    patch(Dropout, "forward", lambda self, x, noise: DROP(self, x, noise) * (1 - self.p if noise else 1.0))


@bug(test="train/data/test_feed.py::test_micro_holds_positions_and_counts")
def a36_masks_repeat_each_step(patch: Patch):
    """Samples are numbered within their step."""

    def fetch(self, step, leaves):
        size = self._global_batch
        return [replace(leaf, samples=leaf.samples % size) for leaf in FETCH(self, step, leaves)]

    patch(Permuted, "fetch", fetch)


@bug(test="models/test_export.py::test_equal_logits")
def a38_rotary_table_through_bf16(patch: Patch):
    """Sines and cosines are rounded on their way."""

    def rotate(x, theta, places):
        half = x.shape[-1] // 2
        at = torch.arange(x.shape[-2])[:, None] * theta ** (-torch.arange(half) / half)
        cos, sin = at.cos().bfloat16().to(x.dtype), at.sin().bfloat16().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    patch(net, "rotate", rotate)


@bug(test="train/state/checkpoint/test_checkpoint_saver.py::test_all_ranks_save_again_and_again")
def a40_saved_without_a_copy(patch: Patch):
    """A save in the background reads tensors that training already changes."""
    patch(Saver, "_stage", lambda self, pieces: list(pieces))


@bug(test="parallel/test_stochastic.py::test_the_mean_of_many_draws_is_the_number")
def draws_of_one_bit_too_few(patch: Patch):
    """Noise that never reaches the upper half: what is rounded drifts towards zero."""
    patch(Dither, "_draws", lambda self, *given: DRAWS(self, *given) >> 1)
