"""Layers cut over ranks, and stages that pass activations on."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from tests.verify.mutations.planting import bug
from unisono import parallelize
from unisono.comm.group import Group
from unisono.models.gpt.net import Positions
from unisono.parallel import shard, tensor
from unisono.parallel.play import StagePlayer
from unisono.parallel.tensor import (
    Crossing,
    RowLinear,
    VocabCrossEntropy,
    VocabEmbedding,
)

SLOTS, LOSS = parallelize.slots_of, tensor.vocab_loss
GATHER, SEND_F, SEND_B = Group.all_gather, StagePlayer._send_activation, StagePlayer._send_gradient
BACK = Crossing.backward
FSDP_GATHER = shard.ShardGather.__call__


@bug("tp=2", "not_reduced")
def norm_gradients_not_summed_over_tp(patch):
    """Under sequence parallelism a norm's weight sees a slice of the positions; its gradient is a partial sum."""
    patch(
        parallelize,
        "slots_of",
        lambda *given, **named: [replace(s, sum_over=frozenset()) for s in SLOTS(*given, **named)],
    )


@bug("tp=2", "factor_of_axis", "forward")
def row_bias_added_on_every_rank(patch):
    """The bias of a row-parallel layer is added before the sum: tp times."""

    def forward(self, x):
        return tensor.leave(F.linear(x, self.weight, self.bias), self.group, self.sequence)

    patch(RowLinear, "forward", forward)


@bug("tp=2", "forward")
def positions_begin_at_zero_everywhere(patch):
    """Under sequence parallelism every rank takes the first rows of the position table."""
    patch(Positions, "forward", lambda self, x, noise=None: x + self.weight[: x.shape[1]])


@bug("tp=2", "forward")
def targets_off_by_one_in_the_vocabulary(patch):
    """The slice of the vocabulary is thought to begin one later."""
    patch(tensor, "vocab_loss", lambda group, start: LOSS(group, start + 1))


@bug("tp=2", "forward")
def largest_logit_not_reduced(patch):
    """Each rank subtracts the largest logit of its own slice and adds the powers anyway."""
    forward = VocabCrossEntropy.forward

    class Alone:
        def __init__(self, group):
            self.group = group

        def all_reduce(self, x, op=None):
            return x if op is not None else self.group.all_reduce(x)

    patch(
        VocabCrossEntropy,
        "forward",
        staticmethod(lambda ctx, x, t, s, group: forward(ctx, x, t, s, Alone(group))),
    )


@bug("tp=2", "forward")
def foreign_tokens_not_masked(patch):
    """Tokens of another rank's slice read row 0 instead of giving zero."""

    def forward(self, tokens):
        local = tokens - self.start
        foreign = (local < 0) | (local >= self.weight.shape[0])
        x = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return tensor.leave(x, self.group, self.sequence)

    patch(VocabEmbedding, "forward", forward)


@bug("tp=2", "forward")
def positions_gathered_in_the_wrong_order(patch):
    """All-gather puts the parts together from the last rank to the first."""

    def gather(self, x):
        out = GATHER(self, x)
        return torch.cat(out.chunk(self.size)[::-1]) if self.axis == "tp" else out

    patch(Group, "all_gather", gather)


@bug("shard=2", "forward")
def shards_gathered_in_the_wrong_order(patch):
    """Gathered parameters have their halves exchanged."""

    def call(self, output_tensor, input_tensor, group, async_op=False):
        work = FSDP_GATHER(self, output_tensor, input_tensor, group, async_op)
        output_tensor.copy_(output_tensor.roll(len(output_tensor) // 2, 0))
        return work

    patch(shard.ShardGather, "__call__", call)


@bug("tp=2", "gradient", "not_reduced", "rank_slice")
def column_backward_not_summed(patch):
    """Backward of a column-parallel layer keeps this rank's part of the input's gradient."""

    def backward(ctx, grad):
        if ctx.back is not tensor.scatter_sum:
            return BACK(ctx, grad)
        size = grad.shape[1] // ctx.group.size
        return grad.narrow(1, ctx.group.index * size, size).contiguous(), None, None, None, None

    patch(Crossing, "backward", staticmethod(backward))


@bug("tp=2", "forward")
def row_output_averaged(patch):
    """The partial sums of a row-parallel layer are averaged."""
    scatter = tensor.scatter_sum
    patch(tensor, "scatter_sum", lambda x, group: scatter(x, group) / group.size)


@bug("pp=2 schedule=gpipe", "leaves_permuted", dropout=0.0)
def activations_sent_in_another_order(patch):
    """A stage sends its micro-batches in pairs the wrong way round; the next one takes them as they come."""

    def send(self, action):
        other = action.micro ^ 1
        swapped = replace(action, micro=other if (action.stage, other) in self._outputs else action.micro)
        SEND_F(self, swapped)

    forward = StagePlayer._forward

    def both(self, action):
        forward(self, action)
        if self.stages[action.stage].first and action.micro % 2 == 0 and len(self._leaves) > action.micro + 1:
            forward(self, replace(action, micro=action.micro + 1))

    patch(StagePlayer, "_send_activation", send)
    patch(StagePlayer, "_forward", both)


@bug("pp=2", "leaves_permuted", dropout=0.0)
def targets_in_another_order(patch):
    """The last stage reads its targets from the other end of the batch."""
    play = StagePlayer.play

    def reversed_targets(self, row, leaves, weight, seed):
        others = [replace(a, targets=b.targets) for a, b in zip(leaves, leaves[::-1], strict=True)]
        return play(self, row, others if 1 in self.stages else leaves, weight, seed)

    patch(StagePlayer, "play", reversed_targets)


@bug("pp=2", "gradient", "stale_gradient", "missing_micro_batch")
def gradient_of_the_micro_batch_before(patch):
    """A stage's buffer is reused before it has left: the first stage gets the gradient of the micro-batch before."""
    last = {}

    def send(self, action):
        (x,) = self._inputs[action.stage, action.micro]
        own = x.grad.clone()
        if action.micro:
            x.grad = last["grad"]
        last["grad"] = own
        SEND_B(self, action)

    patch(StagePlayer, "_send_gradient", send)


@bug("pp=2", "factor_of_axis", "factor")
def gradient_scaled_between_stages(patch):
    """The loss is scaled once more on the way back through a stage."""

    def send(self, action):
        (x,) = self._inputs[action.stage, action.micro]
        x.grad.mul_(1 / len(self._leaves))
        SEND_B(self, action)

    patch(StagePlayer, "_send_gradient", send)


@bug("pp=2", "forward")
def activations_travel_in_bf16(patch):
    """Activations are rounded to bf16 between stages."""

    def send(self, action):
        (y,) = self._outputs[action.stage, action.micro]
        y.data.copy_(y.data.bfloat16())
        SEND_F(self, action)

    patch(StagePlayer, "_send_activation", send)


@bug("tp=2", "initialisation")
def slices_counted_from_elsewhere(patch):
    """A rank loads another slice of a weight than the one that it computes and updates as."""
    cut = tensor.Cut

    def other(dim, start, size, full):
        return cut(dim, (start + 1) % (full - size + 1), size, full)

    patch(tensor, "Cut", other)
