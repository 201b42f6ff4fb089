"""The sum over micro-batches, shards and replicas."""

from tests.verify.mutations.in_data import rank
from tests.verify.mutations.planting import bug
from unisono.codecs.plain import PlainCoder
from unisono.comm.group import Group
from unisono.parallel import shard
from unisono.parallel.play import StagePlayer
from unisono.parallel.shard import Sharded
from unisono.parallel.ties import Tie
from unisono.sync import canonical
from unisono.sync.canonical import CanonicalSync, TreeCoder
from unisono.sync.every_step import EveryStepSync
from unisono.train.step import bucketing, train_step
from unisono.train.step.gradients import Gradients
from unisono.train.step.numbers import Line

PLAY, BACKWARD, READY, DEAL = (
    StagePlayer.play,
    StagePlayer._backward,
    EveryStepSync.grad_ready,
    bucketing.deal,
)
CLOSE, WRITE, REDUCE, SETTLE = Gradients.close, Line.write, Group.all_reduce, EveryStepSync.settle
BEFORE, SCATTER, START = Sharded.before_backward, shard.ShardScatter.__call__, Group.start_all_reduce


def small_buckets(patch):
    """Several buckets, some of which leave while backward still runs."""
    patch(bucketing, "deal", lambda params, cap_bytes=0: DEAL(params, 8192))
    patch(bucketing, "CAP_BYTES", 8192)
    patch(bucketing, "AT_ONCE", 8192)


# Weights --------------------------------------------------------------------------------------------------------


@bug("dp=2", "factor_of_axis")
def loss_by_local_tokens(patch):
    """The loss is divided by the tokens of this rank instead of those of the global batch."""
    patch(EveryStepSync, "weigh", lambda self, count: 1.0 / count)


@bug("dp=2", "factor_of_axis")
def averaged_over_micro_batches_twice(patch):
    """A mean inside the loss and a division by the number of accumulation steps outside."""
    patch(
        StagePlayer, "play", lambda self, row, leaves, w, seed: PLAY(self, row, leaves, w / len(leaves), seed)
    )


@bug("dp=2 sync=every_step:speeds=3/1", "factor")
def uneven_replicas_weigh_alike(patch):
    """Replicas with unlike numbers of micro-batches: a mean over replicas of means over their own."""
    patch(
        train_step,
        "targets_of",
        lambda run, leaves: run.mesh.dp.size * sum(x.targets.numel() for x in leaves),
    )


@bug("shard=2", "factor_of_axis")
def sharded_gradients_averaged(patch):
    """FSDP divides by the number of shards although the loss is already weighted."""
    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor
    patch(FSDPModule, "set_gradient_divide_factor", lambda self, factor: divide(self, 2.0))


@bug("dp=4", "factor_of_axis")
def replicas_averaged_twice(patch):
    """Divided by the number of replicas before the sum, and in the loss."""

    def ready(self, bucket):
        bucket.body.div_(self.dp.size)
        READY(self, bucket)

    patch(EveryStepSync, "grad_ready", ready)


@bug("dp=2", "loss_reduction")
def reported_loss_not_averaged(patch):
    """The gradients are right and the loss on the screen is a sum over ranks."""
    patch(Line, "write", lambda self, losses, stop, lacks: WRITE(self, losses * 2, stop, lacks))


@bug("dp=2", "loss_reduction")
def loss_summed_in_single(patch):
    """Losses are added up in less precision than they have."""
    patch(Line, "write", lambda self, losses, stop, lacks: WRITE(self, losses.float(), stop, lacks))


# Lost and doubled -----------------------------------------------------------------------------------------------


@bug("dp=2", "missing_micro_batch")
def all_but_the_last_micro_batch_lost(patch):
    """Gradients are cleared between micro-batches; the loss looks right."""

    def backward(self, action):
        for p in self.stages[action.stage].parameters():
            p.grad = None
        BACKWARD(self, action)

    patch(StagePlayer, "_backward", backward)


@bug("pp=2", "missing_micro_batch")
def first_micro_batch_lost(patch):
    """Gradients are cleared after the warm-up of the pipeline instead of before."""

    def backward(self, action):
        BACKWARD(self, action)
        if action.micro == 0:
            for p in self.stages[action.stage].parameters():
                p.grad = None

    patch(StagePlayer, "_backward", backward)


@bug("dp=2", "leaf_missing")
def uneven_rest_dropped(patch):
    """The last micro-batch of a rank is dropped as if it were an uneven rest."""

    def play(self, row, leaves, weight, seed):
        return PLAY(self, [a for a in row if a.micro < len(leaves) - 1], leaves, weight, seed)

    patch(StagePlayer, "play", play)


@bug("dp=2", "counted_twice")
def one_micro_batch_counts_twice(patch):
    """A gradient is added by a hook and again by the accumulation."""

    def backward(self, action):
        before = [None if p.grad is None else p.grad.clone() for p in self.stages[action.stage].parameters()]
        BACKWARD(self, action)
        if action.micro == 1:
            for p, old in zip(self.stages[action.stage].parameters(), before, strict=True):
                if p.grad is not None:
                    p.grad.add_(p.grad - (0 if old is None else old))

    patch(StagePlayer, "_backward", backward)


@bug("dp=2", "missing_share")
def a_replica_sends_zeros(patch):
    """One replica's buffers are cleared before they leave."""

    def ready(self, bucket):
        if rank() == 1:
            bucket.body.zero_()
        READY(self, bucket)

    patch(EveryStepSync, "grad_ready", ready)


@bug("dp=2", "not_reduced")
def last_bucket_never_reduced(patch):
    """A bucket that fills after the others is forgotten: its parameters drift apart."""
    small_buckets(patch)

    held = {}

    def all_but_the_last(self, bucket):
        before, held[id(self)] = held.get(id(self)), bucket
        if before is not None:
            READY(self, before)

    def settle(self):
        held.pop(id(self), None)
        return SETTLE(self)

    patch(EveryStepSync, "grad_ready", all_but_the_last)
    patch(EveryStepSync, "settle", settle)


@bug("dp=2", "missing_micro_batch", "not_reduced")
def bucket_reduced_before_it_is_full(patch):
    """A bucket departs when all but one of its gradients are there."""
    small_buckets(patch)

    def hook(self, bucket, part):
        def arrived(_):
            bucket.waiting -= 1
            if self._final and bucket.waiting == 1:
                bucket.fill()
                self.sync.grad_ready(bucket)
            elif bucket.waiting == 0 and not self._final:
                self._full(bucket)

        return arrived

    def depart(self):
        self._next = len(self._early)

    def at_once(self, bucket):
        self.dp.all_reduce(bucket.flat)

    patch(Gradients, "_hook", hook)
    patch(Gradients, "_depart", depart)
    patch(EveryStepSync, "grad_ready", at_once)


@bug("shard=2 zero=1", "missing_share")
def sharded_gradients_never_scattered(patch):
    """`no_sync` is never left: the shards have no gradient."""

    def before(self, last):
        BEFORE(self, False)

    patch(Sharded, "before_backward", before)


@bug("shard=2", "permuted", "rank_slice")
def scattered_in_the_wrong_order(patch):
    """Reduce-scatter hands each rank its neighbour's part."""

    def call(self, output_tensor, input_tensor, group, op, async_op=False):
        half = len(input_tensor) // 2
        SCATTER(self, output_tensor, input_tensor.roll(half, 0), group, op, async_op)

    patch(shard.ShardScatter, "__call__", call)


@bug("dp=2", "loss_reduction", "gradient")
def largest_instead_of_sum(patch):
    """The collective is called with another operation."""
    import torch.distributed as dist

    def start(self, x):
        REDUCE(self, x, dist.ReduceOp.MAX)
        return START(self, x.clone())

    patch(Group, "start_all_reduce", start)


# Old gradients --------------------------------------------------------------------------------------------------


@bug("dp=2", "carried_over", "stale_gradient")
def gradients_not_cleared(patch):
    """Nobody clears the gradients after the update: the next step adds to them."""
    patch(Gradients, "forget", lambda self: None)


@bug("dp=2", "stale_gradient")
def gradients_of_the_step_before(patch):
    """The update does not wait for the sums and uses what the buffers still hold."""
    old = {}

    def close(self, *given):
        verdict = CLOSE(self, *given)
        for slot in self.slots:
            new = slot.master.grad
            if new is not None:
                key = id(self), slot.name
                kept, old[key] = old.get(key), new.clone()
                slot.master.grad = new if kept is None else kept
        return verdict

    patch(Gradients, "close", close)


@bug("shard=2 zero=2", "stale_parameters")
def stale_gathered_parameters(patch):
    """FSDP keeps gathered parameters over the update and computes with those of the step before."""

    def before(self, last):
        BEFORE(self, last)
        for module, _ in self._zeros:
            module.set_reshard_after_backward(False, recurse=False)

    patch(Sharded, "before_backward", before)


# Ties -----------------------------------------------------------------------------------------------------------


@bug("dp=2", "tied_use_missing")
def tied_gradient_dropped(patch):
    """The classifier's share in the embedding's gradient is lost."""
    patch(Tie, "add_uses", lambda self: None)


@bug("dp=2", "tied_use_twice")
def tied_gradient_counted_twice(patch):
    """Autograd adds both uses, and the framework does it again."""

    def add(self):
        if len(self.here) == 2:
            self.here[0].master.grad.add_(self.here[1].master.grad, alpha=2.0)

    patch(Tie, "add_uses", add)


@bug("pp=2", "tied_use_missing")
def tied_stages_not_joined(patch):
    """First and last stage hold one weight and never exchange its gradient."""
    patch(Tie, "join", lambda self: False)


# Precision and order --------------------------------------------------------------------------------------------


@bug("dp=2", "precision_lost")
def gradients_travel_in_bf16(patch):
    """Communication in bf16 that nobody asked for."""

    def ready(self, bucket):
        bucket.body.copy_(bucket.body.bfloat16())
        READY(self, bucket)

    patch(EveryStepSync, "grad_ready", ready)


@bug("tp=2", "precision_lost")
def one_gradient_through_single(patch):
    """One tensor passes through float32 on its way."""

    def close(self, *given):
        verdict = CLOSE(self, *given)
        grad = self.slots[3].master.grad
        grad.copy_(grad.float())
        return verdict

    patch(Gradients, "close", close)


@bug("dp=2", "few_elements")
def one_element_off_by_a_billionth(patch):
    """A flipped bit in one entry of one gradient: 1e-9 of the tensor's largest entry."""

    def close(self, *given):
        verdict = CLOSE(self, *given)
        grad = self.slots[4].master.grad
        grad.view(-1)[3] += 1e-9 * grad.abs().max()
        return verdict

    patch(Gradients, "close", close)


@bug("dp=4 sync=canonical", "summation_order")
def canonical_order_changed(patch):
    """Parts are added from left to right instead of along the tree: right to rounding, and no longer the same bits."""

    def from_left(parts):
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    patch(canonical, "tree_sum", from_left)


@bug("shard=2 sync=canonical", "summation_order")
def canonical_accumulates_in_place(patch):
    """Micro-batches are added one after the other instead of along the tree."""
    from unisono.comm.tree import TreeSum

    def add(self, leaf, x):
        held = self._nodes.pop((-1, 0), None)
        total = x if held is None else held.add_(x)
        self.seen = 1 + getattr(self, "seen", 0) % self.count
        if self.seen == self.count:
            return total
        self._nodes[-1, 0] = total
        return None

    patch(TreeSum, "add", add)


@bug("dp=4 sync=canonical:speeds=1/4/1/1", "summation_order")
def canonical_branches_in_the_order_of_replicas(patch):
    """Replicas hold unlike branches of the tree, and their sums are paired as if these were equal."""
    patch(CanonicalSync, "assigned", lambda self, stretches, shards: None)


@bug("dp=4 sync=canonical", "summation_order")
def canonical_by_the_backends_all_reduce(patch):
    """The exchange is replaced by the backend's all-reduce, whose order depends on the number of ranks."""

    patch(TreeCoder, "exchange", PlainCoder.exchange)
