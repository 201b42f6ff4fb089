"""In what numbers: eight bits on `shard`, gathers ahead, rounded weights and their masters, the scale of the loss."""

import torch

from tests.verify.mutations.in_data import rank
from tests.verify.mutations.planting import WIDE, bug
from unisono.parallel import masters
from unisono.parallel.shard import ShardGather, ShardScatter
from unisono.parallel.stochastic import KEPT, Dither
from unisono.parallel.wires import EightBits
from unisono.train.step import update
from unisono.train.step.scaling import DynamicScale
from unisono_contrib.parallel import float8

SINGLE = {"train.dtype": "float32"}
ENCODE, DECODE, GATHER, SCATTER = (
    EightBits.encode,
    EightBits.decode,
    ShardGather.__call__,
    ShardScatter.__call__,
)
UNSCALE, REFRESH, ROUNDED = DynamicScale.unscale, masters.Refresh.__call__, Dither.rounded
QUANTIZED = float8.quantized
ALONE = {**WIDE, "train.dtype": "float32"}


@bug("shard=3 zero=3:gather=int8", "forward", recipe=WIDE)
def levels_cut_off_instead_of_rounded(patch):
    """A cast to int8 that truncates: weights shrink by half a level."""

    def encode(self, x):
        smaller = torch.where(x == 0, x, x - x.sign() * x.abs().amax() / 300)
        return ENCODE(self, smaller)

    patch(EightBits, "encode", encode)


@bug("dp=2 shard=3 zero=3:gather=int8", "forward", "replicas_drifted", recipe=WIDE)
def own_part_left_as_it_is(patch):
    """Each rank computes with its own rows exact and those of others rounded: no two have the same weights."""

    def gather(self, output_tensor, input_tensor, group, async_op=False):
        own = input_tensor.clone()
        work = GATHER(self, output_tensor, input_tensor, group, async_op)
        output_tensor.view(self.group.size, -1)[self.group.index].copy_(own)
        return work

    patch(ShardGather, "__call__", gather)


@bug("shard=2 pp=2 zero=3:scatter=int8", "factor", "factor_of_axis", "rank_slice", "gradient", recipe=WIDE)
def scales_of_the_first_rank_taken_for_all(patch):
    """Codes are decoded by one scale: that of the part on top."""

    def decode(self, code, dtype):
        parts = DECODE(self, code, dtype)
        if len(parts) > 1 and rank() >= 2:
            parts[1:] *= 0.5
        return parts

    patch(EightBits, "decode", decode)


@bug("dp=2 shard=3 zero=2:scatter=int8", "missing_share", "missing_micro_batch", "rank_slice", recipe=WIDE)
def codes_of_the_last_rank_never_added(patch):
    """The sum over ranks stops one short."""

    def decode(self, code, dtype):
        parts = DECODE(self, code, dtype)
        return parts[:-1] if len(parts) > 2 else parts

    patch(EightBits, "decode", decode)


@bug("shard=2 dp=2 zero=3:prefetch=2", "stale_parameters", recipe=WIDE)
def what_was_gathered_ahead_is_of_the_step_before(patch):
    """A gather that left before the update of what it gathers."""
    before = {}

    def gather(self, output_tensor, input_tensor, group, async_op=False):
        key = id(self)
        old, before[key] = before.get(key), input_tensor.clone()
        moved = old is not None and not torch.equal(old, input_tensor)
        if moved:
            before[key, "old"] = old
        stale = before.get((key, "old"))
        return GATHER(self, output_tensor, input_tensor if stale is None else stale, group, async_op)

    patch(ShardGather, "__call__", gather)


@bug("dp=2 pp=3 zero=3:gather=int8", "stale_parameters", recipe=WIDE)
def rounded_weights_of_the_last_stage_never_refreshed(patch):
    """The optimiser steps masters, and forward goes on with what was rounded first."""

    def refresh(self, *given):
        if rank() < 4 or not self.seen:
            REFRESH(self, *given)

    patch(masters.Refresh, "__call__", refresh)


@bug("dp=2 pp=2 zero=3:gather=int8", "lost_between_steps", "stale_parameters", recipe=WIDE)
def fused_update_that_nobody_hears_of(patch):
    """A fused kernel changes parameters and leaves their version as it was. Only a loaded checkpoint is heard of: so
    it shows in the steps that follow each other."""
    patch(update, "increment_version", lambda tensors: None)


@bug("dp=2 shard=2 precision=fp16:scale=1024", "factor", "factor_of_axis", "rank_slice", "gradient",
     recipe=SINGLE)  # fmt: skip
def scale_left_in_one_shard(patch):
    """Gradients are unscaled by the first rank of each replica alone."""
    patch(DynamicScale, "unscale", lambda self, slots: UNSCALE(self, slots) if rank() % 2 == 0 else None)


@bug("dp=2 pp=2 precision=fp16:scale=1024", "factor", "factor_of_axis", "gradient", recipe=SINGLE)
def scale_taken_out_twice_on_the_first_stage(patch):
    """Once where gradients meet, and once before they are clipped."""

    def unscale(self, slots):
        UNSCALE(self, slots)
        if rank() < 2:
            UNSCALE(self, slots)

    patch(DynamicScale, "unscale", unscale)


@bug("dp=2 shard=2 precision=bf16:stochastic", "rounding_draws", recipe=ALONE)
def draws_by_the_place_in_a_ranks_own_part(patch):
    """An element is numbered in what this rank holds, not in the whole tensor: every part has the first one's draws."""
    patch(
        Dither, "rounded", lambda self, x, name, start, shape: ROUNDED(self, x, name, (0,) * x.dim(), shape)
    )


@bug("dp=2 pp=3 precision=bf16:stochastic", "rounding_draws", "replicas_drifted", recipe=ALONE)
def each_replica_draws_its_own_noise(patch):
    """Noise seeded by rank, as with a generator of its own: copies of a weight go apart, a digit at a time."""

    def rounded(self, *given):
        return ROUNDED(Dither(self.seed + rank() // 3 % 2, self.owners, self.step), *given)

    patch(Dither, "rounded", rounded)


@bug("pp=2 sync=canonical precision=bf16:stochastic", "rounding_draws", recipe=ALONE)
def update_of_the_last_stage_rounded_to_the_nearest(patch):
    """The cast back to bf16 does not know of the noise: updates below half a digit are lost."""

    def rounded(self, x, *given):
        return x.to(KEPT) if rank() else ROUNDED(self, x, *given)

    patch(Dither, "rounded", rounded)


@bug("dp=2 pp=3 precision=bf16:fp8", "forward", "loss_reduction", recipe=ALONE)
def scale_of_the_first_row_taken_for_all(patch):
    """One scale for a whole factor on the last stage, and that of a row of other numbers: what is larger is cut off."""

    def quantized(x, kind):
        if rank() < 4:
            return QUANTIZED(x, kind)
        _, scale = QUANTIZED(x, kind)
        first = (scale[:1] / 64).expand_as(scale).contiguous()
        return (x.float() / first).clamp(-448, 448).to(kind), first

    patch(float8, "quantized", quantized)


@bug(
    "dp=2 shard=2 precision=bf16:fp8",
    "rank_slice",
    "gradient",
    "missing_share",
    "missing_micro_batch",
    recipe=ALONE,
)
def gradients_of_one_replica_in_the_format_of_weights(patch):
    """Three bits of fraction and too few of exponent: what is small beside its row is zero."""

    def quantized(x, kind):
        return QUANTIZED(x, float8.AHEAD if kind is float8.BACK and rank() >= 2 else kind)

    patch(float8, "quantized", quantized)


@bug("pp=2 precision=bf16:fp8", "rounding_float8", both=True, recipe=ALONE)
def scale_too_small_by_half(patch):
    """The largest entries of every row overflow to the largest number there is. One device does so too."""

    def quantized(x, kind):
        _, scale = QUANTIZED(x, kind)
        most = torch.finfo(kind).max
        return (x.float() / (scale / 4)).clamp(-most, most).to(kind), scale / 4

    patch(float8, "quantized", quantized)
