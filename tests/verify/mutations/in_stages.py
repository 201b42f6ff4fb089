"""Of timetables: several stages a rank, halves of a backward, two copies of the model, and steps without a flush."""

from types import MappingProxyType

from tests.verify.mutations.in_data import rank
from tests.verify.mutations.planting import WIDE, bug
from unisono.parallel.mirror import Mirror
from unisono.parallel.play import StagePlayer
from unisono.parallel.player import BackwardCall
from unisono.train.step.gradients import Gradients
from unisono_contrib.parallel.flow import Stash
from unisono_contrib.programs.schedules.pipedream import PipeDream
from unisono_contrib.train.step.flow import FlowGradients

DEEP = MappingProxyType({**WIDE, "model.n_layer": 4})
FLOW = MappingProxyType({**WIDE, "train.clip": 0})
BACK, VERSION, ADD, TURN = Stash.backward, PipeDream.version, Mirror.add_up, StagePlayer._take_turn
HAND, UPDATE = StagePlayer._hand_back, FlowGradients._update


@bug("pp=3 schedule=pipedream", "stale_run", "wrong_version", recipe=FLOW)
def backward_with_the_newest_weights(patch):
    """PipeDream without its stash: what a forward has kept is not what its backward multiplies with."""

    def backward(self, micro):
        version = BACK(self, micro)
        for slot in self.slots:
            slot.live.data = slot.master.data
        return version

    patch(Stash, "backward", backward)


@bug("dp=2 pp=2 schedule=pipedream:buffers=2", "wrong_version", recipe=FLOW)
def two_buffers_without_their_delay(patch):
    """2BW that takes the newest weights there are: its stages are not of one version."""

    def version(self, stage, ranks, micros, micro):
        return max(0, (micro - (ranks - 1 - stage)) // micros)

    patch(PipeDream, "version", version)


@bug("dp=3 pp=2 schedule=pipedream", "stale_run", recipe=FLOW)
def gradients_kept_over_the_update_inside(patch):
    """The update stands in the middle of a row, where nobody drops what it has used."""

    def update(self, offset, losses):
        kept = {id(slot): slot.live.grad for slot in self.slots}
        UPDATE(self, offset, losses)
        for slot in self.slots if rank() % 2 else ():
            slot.live.grad = kept[id(slot)]

    patch(FlowGradients, "_update", update)


@bug("tp=2 pp=2 schedule=pipedream", "stale_run", recipe=FLOW)
def one_stage_updates_a_step_late(patch):
    """The second stage makes the update of a step with the learning rate of the step before it, and none at first."""

    def update(self, offset, losses):
        UPDATE(self, offset - (self.run.mesh.at["pp"] == 1), losses)

    patch(FlowGradients, "_update", update)


@bug("dp=2 pp=2 schedule=interleaved", "factor_of_axis", recipe=DEEP)
def buckets_leave_when_one_stage_is_through(patch):
    """Of a rank's two stages the first that is through is taken for all, and what has left leaves again: it is added up
    over replicas twice."""

    def turn(self, action, backward, **tags):
        tell = self.before_backward
        self.before_backward = lambda turn: tell(BackwardCall(turn.stage, turn.micro, turn.last, turn.last))
        TURN(self, action, backward, **tags)
        self.before_backward = tell

    patch(StagePlayer, "_take_turn", turn)


@bug("pp=3 schedule=zb1p", "missing_micro_batch", recipe=WIDE)
def weights_halves_of_the_last_micro_batch_forgotten(patch):
    """Its W stands behind the last message, and the last stage does not come to it."""

    def turn(self, action, backward, **tags):
        lost = tags and action.micro == 11 and action.stage == 2
        TURN(self, action, (lambda: None) if lost else backward, **tags)

    patch(StagePlayer, "_take_turn", turn)


@bug("tp=2 pp=2 schedule=zbv", "factor", recipe=DEEP)
def the_turn_of_the_v_hands_back_half(patch):
    """Two stages that share a rank hand over without a message, and halve what messages would carry."""

    def hand(self, action):
        HAND(self, action)
        for grad in self._grads.get((action.stage - 1, action.micro), ()):
            grad.mul_(0.5)

    patch(StagePlayer, "_hand_back", hand)


@bug("dp=2 pp=2 schedule=dualpipe", "not_reduced", recipe=WIDE)
def copies_added_up_in_the_first_replica_alone(patch):
    """The second replica's two copies of the model learn each from its own half."""

    def alone(self, *given):
        if self.group is not None and min(self.group.ranks) == 0:
            ADD(self, *given)

    patch(Mirror, "add_up", alone)


@bug("dp=2 pp=2 schedule=zb2p", "counted_twice", recipe=WIDE)
def weights_half_of_the_first_micro_batch_added_twice(patch):
    """The gradient that warms the pipeline up is added by B and by W."""

    def turn(self, action, backward, **tags):
        TURN(self, action, backward, **tags)
        for p in self.stages[action.stage].parameters() if tags and action.micro == 0 else ():
            if p.grad is not None:
                p.grad.mul_(2.0)

    patch(StagePlayer, "_take_turn", turn)


@bug("shard=2 zero=2 pp=2 schedule=interleaved sync=canonical", "missing_share", recipe=MappingProxyType(
    {**DEEP, "train.global_batch": 8}
))  # fmt: skip
def a_whole_sum_lost_when_the_other_stage_goes_on(patch):
    """What is taken from the sharded parameter overwrites a sum over all leaves that is there already."""

    def done(self, leaf):
        for slot in self.slots:
            slot.take_gradient()
            grad = slot.master.grad
            slot.drop_gradient()
            if grad is not None:
                slot.master.grad = self.trees[slot.name].add(leaf, grad)

    patch(Gradients, "leaf_done", done)
