"""Errors that were really made, and silent: rebuilt here after how their authors and finders describe them.

Systems, issues and pull requests are named as they stand on GitHub. Two papers collect such errors: TTrace (arXiv
2506.09280), of Megatron-LM, and TrainCheck (OSDI 2025).
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from tests.verify.mutations.in_clipping import line_of
from tests.verify.mutations.in_data import rank
from tests.verify.mutations.in_updates import before
from tests.verify.mutations.planting import WIDE, bug
from unisono import parallelize
from unisono.models.noise import Dropout, Noise
from unisono.parallel import tensor
from unisono.parallel.fill import fill
from unisono.parallel.params import slots_of
from unisono.parallel.play import StagePlayer
from unisono.parallel.tensor import RowLinear, VocabCrossEntropy
from unisono.parallel.ties import Tie
from unisono.sync.every_step import EveryStepSync
from unisono.train.build import build
from unisono.train.step import join, update
from unisono.train.step.grad_norm import ByTensor, clip
from unisono.train.step.gradients import Gradients

READY, JOIN, BEGIN, CLOSE = EveryStepSync.grad_ready, Tie.join, Gradients.begin, Gradients._close_replica
FORWARD, BACKWARD, MEASURE = StagePlayer._forward, StagePlayer._backward, ByTensor.__call__
PADDED = f"{Path(__file__).parents[3] / 'examples/padding.py'}:Padded:token=32"  # spaces do not count
BITS, MAKE, RATE = Dropout.bits, update.make, update.update_of


# Sums that were not made, or not over these ranks -------------------------------------------------------------------


@bug("dp=2 tp=3", "not_reduced", recipe=WIDE, source="Megatron-LM issue 1446")
def real_final_norm_not_summed_over_tp(patch):
    """With sequence parallelism the gradients of the last norm differ between tensor-parallel ranks."""

    def slots(*given, **named):
        return [
            replace(s, sum_over=frozenset()) if s.name.startswith("head.norm") else s
            for s in slots_of(*given, **named)
        ]

    patch(parallelize, "slots_of", slots)


@bug(
    "dp=2 pp=2", "replicas_drifted", "missing_micro_batch", "missing_share",
    recipe=WIDE, source="Megatron-LM issue 844",
)  # fmt: skip
def real_ties_joined_before_all_replicas_met(patch):
    """With a distributed optimiser the embedding's half is reduced on one replica and the head's on another; then
    stages add up what their own replica has."""
    own = {}

    def ready(self, bucket):
        own.update({(rank(), id(p)): p.grad.clone() for p in bucket.params})
        READY(self, bucket)

    def joined(self):
        master = self.here[0].master
        if rank() in (0, 3):
            master.grad = own[rank(), id(master)]
        return JOIN(self)

    patch(EveryStepSync, "grad_ready", ready)
    patch(Tie, "join", joined)


@bug("dp=4", "not_reduced", recipe=WIDE, source="verl issue 7493 (FSDP1)")
def real_shards_of_one_never_meet(patch):
    """fsdp_size=1 on several GPUs: nothing is sharded, and nothing is synchronised either."""
    patch(EveryStepSync, "grad_ready", lambda self, bucket: None)


@bug("dp=3 pp=2", "missing_share", recipe=WIDE, source="DeepSpeed issue 8061 (overlap_comm)")
def real_sum_begins_before_the_copy_has_ended(patch):
    """The stream that reduces waits for another one than that which still writes into the bucket."""

    def ready(self, bucket):
        if rank() % 3 == 1:
            bucket.views[-1].zero_()
        READY(self, bucket)

    patch(EveryStepSync, "grad_ready", ready)


@bug("dp=2 tp=3", "factor_of_axis", recipe=WIDE, source="DeepSpeed pull request 5555 (Ulysses)")
def real_averaged_over_the_ranks_of_a_sequence_too(patch):
    """Gradients are divided by the ranks of data and sequence parallelism together: a third of what they should be."""

    def ready(self, bucket):
        bucket.body.div_(3)
        READY(self, bucket)

    patch(EveryStepSync, "grad_ready", ready)


# Micro-batches ------------------------------------------------------------------------------------------------------


@bug("shard=3 zero=2", "missing_micro_batch", recipe=WIDE, source="open-instruct pull request 1498 (ZeRO-2)")
def real_accumulator_reset_at_each_boundary(patch):
    """Every backward is taken for the last of a step, so that only the last one counts."""

    def begin(self, turn):
        for slot in self.slots:
            slot.live.grad = None
        BEGIN(self, turn)

    patch(Gradients, "begin", begin)


@bug("dp=2 pp=3", "missing_micro_batch", recipe=WIDE, source="NeMo Automodel pull request 3530")
def real_stages_made_anew_between_micro_batches(patch):
    """Stages are initialised again for another sequence length, which clears gradients; losses look fine."""

    def backward(self, action):
        for p in self.stages[action.stage].parameters():
            p.grad = None
        BACKWARD(self, action)

    patch(StagePlayer, "_backward", backward)


@bug("tp=2 pp=2", "factor", "factor_of_axis", recipe=WIDE, source="torchtitan issue 1733")
def real_divided_at_each_accumulation(patch):
    """A pipeline divides gradients by its micro-batches at the end of each of two rounds: the first is divided twice."""

    def backward(self, action):
        BACKWARD(self, action)
        if action.micro == len(self._leaves) // 2 - 1:
            for p in self.stages[action.stage].parameters():
                p.grad.div_(len(self._leaves) // 2)

    patch(StagePlayer, "_backward", backward)


@bug("dp=2 pp=3", "factor_of_axis", recipe=WIDE, source="torchtitan issue 2972")
def real_pipeline_leaves_gradients_unnormalised(patch):
    """Under a pipeline the division by all valid tokens comes after backward: the loss on the screen is right."""

    def forward(self, action):
        FORWARD(self, action)
        if self.stages[action.stage].last:
            key = action.stage, action.micro
            self._outputs[key] = (self._outputs[key][0] / self._weight,)

    patch(StagePlayer, "_forward", forward)


@bug(
    "dp=3 pp=2", "factor",
    recipe={**WIDE, "train.loss": PADDED}, source="transformers pull request 34191",
)  # fmt: skip
def real_each_micro_batch_is_a_mean_of_its_own(patch):
    """Where micro-batches have unequal numbers of targets that count, the mean of their means is another mean."""

    def forward(self, action):
        targets, whole = self._leaves[action.micro].targets, self._weight
        self._weight = whole * targets.numel() / (targets != 32).sum().item()
        FORWARD(self, action)
        self._weight = whole

    patch(StagePlayer, "_forward", forward)


@bug("shard=3 zero=2 pp=2", "precision_lost", recipe=WIDE, source="DeepSpeed issue 2768")
def real_accumulated_in_bf16(patch):
    """ZeRO adds up gradients in bf16 where it should in float32."""

    def close(self):
        CLOSE(self)
        for slot in self.slots:
            slot.master.grad.copy_(slot.master.grad.bfloat16())

    patch(Gradients, "_close_replica", close)


# Layers, losses, masks ----------------------------------------------------------------------------------------------


@bug("dp=2 tp=3", "factor_of_axis", recipe=WIDE, source="torchtitan pull request 4332")
def real_bias_divided_by_tp(patch):
    """Each rank adds its part of the bias before the sum; autograd divides the bias's gradient too."""

    def forward(self, x):
        y = tensor.leave(torch.nn.functional.linear(x, self.weight), self.group, self.sequence)
        part = self.bias / self.group.size
        return y + (part + (self.bias - part).detach())

    patch(RowLinear, "forward", forward)


@bug("dp=2 tp=3", "forward", recipe=WIDE, source="Megatron-LM issue 7452, number 2")
def real_gathered_logits_taken_for_cut_ones(patch):
    """The loss of logits that every rank has whole is computed as if each had a slice: too large by log(tp)."""
    forward = VocabCrossEntropy.forward

    class Gathered:
        def __init__(self, group):
            self.group = group

        def all_reduce(self, x, *op):
            x = self.group.all_reduce(x, *op)
            if not op:
                x[0] *= self.group.size
            return x

    patch(
        VocabCrossEntropy, "forward",
        staticmethod(lambda ctx, x, targets, start, group: forward(ctx, x, targets, start, Gathered(group))),
    )  # fmt: skip


@bug("tp=4", "initialisation", recipe=WIDE, source="ms-swift pull request 7944")
def real_slices_drawn_from_one_seed(patch):
    """Tensor-parallel ranks draw their slices with equal seeds, so that a layer's slices are copies of each other."""

    def alike(stages, context):
        fill(
            stages, replace(context, cuts={name: replace(cut, start=0) for name, cut in context.cuts.items()})
        )

    passes = [replace(one, apply=alike) if one.name == "fill" else one for one in parallelize.PASSES]
    patch(parallelize, "PASSES", passes)


@bug("dp=2 tp=2", "masks_differ", recipe=WIDE, source="Megatron-LM pull request 206 (BigScience)")
def real_loader_draws_on_one_tp_rank_alone(patch):
    """The first rank's data loader takes numbers from the generator, and from then on its dropout is another."""

    def bits(self, shape, noise):
        return BITS(self, shape, Noise(noise.seed + (rank() % 2 == 0), noise.samples))

    patch(Dropout, "bits", bits)


@bug("dp=2 pp=2 recompute=full", "masks_differ", recipe=WIDE, source="OLMo-core pull request 828")
def real_computed_again_with_fresh_masks(patch):
    """Activation checkpointing does not keep the generator's state, although the model drops."""

    def bits(self, shape, noise):
        again = torch._C._current_graph_task_id() != -1
        return BITS(self, shape, Noise(noise.seed + again, noise.samples))

    patch(Dropout, "bits", bits)


# Norm and clipping --------------------------------------------------------------------------------------------------


@bug(
    "tp=3 pp=2", "replicas_drifted",
    recipe=WIDE, source="DeepSpeed's BF16Optimizer in BLOOM-176B (TrainCheck)",
)  # fmt: skip
def real_norms_clipped_on_the_first_tp_rank_alone(patch):
    """What tensor parallelism leaves whole is clipped on its first rank only, and drifts apart on the others."""

    def clip_and_step(optimizer, slots, norm, limit):
        clip([s for s in slots if not (s.repeated_on and rank() % 3)], norm, limit)
        optimizer.step()

    patch(update, "clip_and_step", clip_and_step)


@bug("dp=3 shard=2", "norm_counted_twice", recipe=WIDE, source="VeOmni issue 184 (hybrid sharding)")
def real_norm_over_replicas_and_shards(patch):
    """Squares are added over all data ranks, though replicas have the same gradients."""

    def measure(self, slots, extra):
        norm, *more = MEASURE(self, slots, extra)
        return [norm * math.sqrt(3), *more]

    patch(ByTensor, "__call__", measure)


@bug("dp=2 pp=3", "norm_counted_twice", recipe=WIDE, source="Megatron-LM pull request 7227")
def real_norm_counts_the_tied_copy(patch):
    """The last stage's copy of the embedding enters the norm beside the embedding itself."""

    def measure(self, slots, extra):
        norm, *more = MEASURE(self, slots, extra)
        copies = [s.master.grad.double().square().sum() for s in slots if s.alias]
        twice = self.replica.all_reduce(sum(copies, extra.new_zeros(())).view(1))
        return [math.sqrt(norm**2 + twice.item()), *more]

    patch(ByTensor, "__call__", measure)


@bug("tp=2 pp=3", "partial_norm", recipe=WIDE, source="torchtitan issue 596")
def real_norm_of_each_stage(patch):
    """Squares are added over the ranks of a stage, and not over stages."""

    def measure(self, slots, extra):
        held = [s for s in slots if s.master.grad is not None and s.counted(self.rank_at)]
        lines = self.replica.all_gather(line_of(self, held, extra)[None]).view(3, 2, -1)
        stage = lines[self.rank_at["pp"]].sum(0)
        return [*self.read(stage)[:1], *lines.sum((0, 1))[self.length :].tolist()]

    patch(ByTensor, "__call__", measure)


# Data and updates ---------------------------------------------------------------------------------------------------


@bug("dp=4", "leaf_twice", recipe=WIDE, source="speculators pull request 427")
def real_local_rank_for_rank(patch):
    """A sampler is given the number of a process on its host: on two hosts of two, two ranks read the same."""
    patch(join, "leaves_of", lambda stretches, mesh: stretches[mesh.rank % 2])


@bug("tp=2 pp=2", "weight_decay", recipe=WIDE, source="Megatron-DeepSpeed pull request 262 (BigScience)")
def real_one_norm_decays(patch):
    """What decays is told by a class's name, which one norm has not."""

    def make(train, slots, device, **more):
        optimizer = MAKE(train, slots, device, **more)
        mine = [s.master for s in slots if s.name == "blocks.0.norm1.weight"]
        for group in list(optimizer.param_groups) if mine else ():
            if any(p is mine[0] for p in group["params"]):
                group["params"] = [p for p in group["params"] if p is not mine[0]]
                optimizer.param_groups.append({**group, "params": mine, "weight_decay": train.weight_decay})
        return optimizer

    patch(update, "make", make)


@bug("dp=2 shard=3", "step_count", recipe=WIDE, source="DeepSpeed pull request 1823 (ZeRO-3)")
def real_adam_counts_for_each_subgroup(patch):
    """The optimiser is called for one part of the model after the other, and counts each time."""

    def count(optimizer):
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                optimizer.state[p]["step"] += number

    patch(update, "make", before(count))


@bug("dp=4", "learning_rate", recipe=WIDE, source="transformers pull request 24088")
def real_schedule_steps_for_each_process(patch):
    """A scheduler whose length counts all processes is also stepped once for each: right at first, then too fast."""

    def update_of(*given, **more):
        made = RATE(*given, **more)
        rate = made.rate
        made.rate = lambda step: rate(4 * step)
        return made

    patch(build, "update_of", update_of)
