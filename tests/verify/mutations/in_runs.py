"""What an adversary planted and what got through then: in the reference as well as in the plan (`both`), in validation,
saving, resuming and the ends of epochs, under plans of three, with data that one device never shows."""

from dataclasses import replace

import torch

from tests.verify.mutations.in_clipping import only_matrices
from tests.verify.mutations.in_data import rank
from tests.verify.mutations.in_updates import after, with_groups
from tests.verify.mutations.planting import bug
from unisono import parallelize
from unisono.comm import tree
from unisono.comm.mesh import Mesh
from unisono.models.gpt.net import Positions
from unisono.parallel import tensor
from unisono.parallel.play import StagePlayer
from unisono.parallel.post import Post
from unisono.parallel.tensor import VocabEmbedding, leave
from unisono.train.data import dataset, order
from unisono.train.data.feed import Permuted
from unisono.train.state import run_state
from unisono.train.state.checkpoint import read
from unisono.train.step import join, update
from unisono.train.step.grad_norm import ByTensor
from unisono.train.step.gradients import Gradients
from unisono.verify import stretch

FORWARD, PLAY, FETCH = StagePlayer._forward, StagePlayer.play, Permuted.fetch
LOAD, RESTORE, COPY, EVALUATE = run_state.load, stretch.restore, read._copy, stretch.evaluate
STEP, EXCESS, MAKE, CLOSE = (
    update.clip_and_step,
    update.excess,
    update.make,
    Gradients.close,
)
SLOTS, MEET = parallelize.slots_of, Mesh._meet
DASHES = "to be \N{EM DASH} or not \N{HORIZONTAL ELLIPSIS} to be \N{LATIN CAPITAL LETTER A WITH GRAVE}, that is it.! "
ODD = f"{__file__.rpartition('/verify/')[0]}/train/odd_models.py:odd"


# Sums -----------------------------------------------------------------------------------------------------------


@bug("dp=2", "factor", "factor_of_axis")
def a02_last_micro_batch_weighs_half(patch):
    """The last micro-batch of a rank is taken for an uneven rest."""

    def forward(self, action):
        whole = self._weight
        self._weight = whole / (1 + (action.micro == len(self._leaves) - 1))
        FORWARD(self, action)
        self._weight = whole

    patch(StagePlayer, "_forward", forward)


@bug("dp=2", "not_reduced", recipe={"model.kind": ODD, "data.tokenizer": "char"}, text=DASHES)
def a12_bucket_without_one_gradient_never_leaves(patch):
    """A bucket waits for a parameter that no loss depends on, and is forgotten."""

    def close(self):
        self.slots_late, self._late = self._late, []
        for slot in self.slots:
            slot.take_gradient()
        self._final = False
        self._wait_anew()

    patch(Gradients, "_close_replica", close)


@bug("pp=2", "kept_activation")
def a14_one_receive_buffer_for_all_micro_batches(patch):
    """Activations of all micro-batches arrive in one place; backward finds the last one there."""

    def ask(self, action):
        wire = self.wires[action.stage - (action.kind == "RECV_F")]
        group = wire.ahead if action.kind == "RECV_F" else wire.back
        rooms = self.__dict__.setdefault("rooms", {})
        kept = rooms.setdefault(
            (action.kind, action.stage), [torch.empty_like(t, device=self.device) for t in wire.carry]
        )
        return [(x.data, group.start_recv(x, action.peer)) for x in kept]

    patch(Post, "_ask", ask)


@bug("dp=3 sync=canonical", "summation_order", both=True, recipe={"train.global_batch": 12})
def a25_canonical_tree_in_halves(patch):
    """The tree splits its leaves in the middle: the same for two and four replicas, not for three."""
    patch(tree, "split", lambda n: n // 2)


@bug("shard=2 sync=canonical", "summation_order")
def a26_canonical_norm_by_tensor(patch):
    """The norm adds squares tensor by tensor, which cutting rows changes."""
    patch(join, "ByRow", lambda shapes, replica, at, blocks: ByTensor(shapes, replica, at))


@bug("shard=2 sync=canonical", "update_rule", recipe={"model.d_model": 36, "train.dtype": "float32"})
def a27_canonical_optimiser_not_evened(patch):
    """A fused kernel rounds the last few elements of a tensor otherwise, and which those are depends on the cut."""
    patch(update, "make", lambda train, slots, device, even=False, **rest: MAKE(train, slots, device, **rest))


@bug("shard=2", "wrong_group")
def a54_summed_over_data_ranks(patch):
    """Gradients meet on all data ranks, `dp` times `shard`, though shards have added up theirs already."""

    def meet(self):
        MEET(self)
        self.dp = self.group("dp", ("dp", "shard"))

    patch(Mesh, "_meet", meet)


# Layers ---------------------------------------------------------------------------------------------------------


@bug("tp=2", "vocabulary", text=DASHES)
def a16_first_row_of_a_slice_lost(patch):
    """The first token of a rank's slice of the vocabulary is taken for another rank's."""

    def forward(self, tokens):
        local = tokens - self.start
        foreign = (local < (self.start > 0)) | (local >= self.weight.shape[0])
        x = torch.nn.functional.embedding(local.masked_fill(foreign, 0), self.weight)
        return leave(x.masked_fill(foreign.unsqueeze(-1), 0.0), self.group, self.sequence)

    patch(VocabEmbedding, "forward", forward)


@bug("tp=2", "initialisation", "raised", recipe={"data.tokenizer": "char"}, text=DASHES)
def a31_odd_vocabulary_cut_by_floor(patch):
    """An odd vocabulary is cut into equal slices, and its last token is nobody's."""
    patch(tensor, "part_of", lambda full, group: (group.index * (full // group.size), full // group.size))


@bug("tp=4", "forward", recipe={"model.n_head": 4})
def a39_position_slices_of_two(patch):
    """Slices of the positions begin as if there were two of them."""

    def forward(self, x, noise=None):
        first = (rank() % 2) * x.shape[1] if x.shape[1] < len(self.weight) else 0
        return x + self.weight[first : first + x.shape[1]]

    patch(Positions, "forward", forward)


@bug("dp=2", "samples_renumbered")
def a61_samples_numbered_per_rank(patch):
    """Every rank numbers its samples from the step's first on: dropout repeats over ranks."""

    def fetch(self, step, leaves):
        first = leaves.start * self._micro_batch
        return [replace(leaf, samples=leaf.samples - first) for leaf in FETCH(self, step, leaves)]

    patch(Permuted, "fetch", fetch)


@bug("shard=3", "initialisation", recipe={"train.global_batch": 12})
def a30_shards_cut_by_floor(patch):
    """Rows of a shard are thought to begin at multiples of the floor, where torch cuts by the ceiling."""

    def slots(stage, shapes, cuts, mesh, *rest, **named):
        made = SLOTS(stage, shapes, cuts, mesh, *rest, **named)
        firsts = [slot.shape[0] // mesh.shard.size * mesh.shard.index for slot in made]
        return [
            replace(slot, start=(first, *slot.start[1:])) for slot, first in zip(made, firsts, strict=True)
        ]

    patch(parallelize, "slots_of", slots)


# Updates, on both sides -----------------------------------------------------------------------------------------


@bug("pp=2", "tied_copies_differ", "weight_decay")
def a05_no_decay_on_the_tied_copy(patch):
    """The last stage's copy of the embedding stands in the group without decay."""

    def make(train, slots, device, **more):
        optimizer = MAKE(train, slots, device, **more)
        alias = next((s.master for s in slots if s.alias), None)
        for group in list(optimizer.param_groups):
            if len(optimizer.param_groups) == 2 and any(p is alias for p in group["params"]):
                group["params"] = [p for p in group["params"] if p is not alias]
                optimizer.param_groups.append({**group, "params": [alias], "weight_decay": 0.0})
        return optimizer

    patch(update, "make", make)


@bug("pp=2", "weight_decay", both=True)
def a06_decay_on_norms(patch):
    """Norms and biases decay."""
    patch(update, "make", with_groups(weight_decay=0.1))


@bug("pp=2", "moments", both=True)
def a07_betas_exchanged(patch):
    """The two decays of Adam in the wrong order."""
    patch(update, "make", with_groups(betas=(0.95, 0.9)))


@bug("pp=2", "precision_lost", both=True)
def a11_master_weights_in_bf16(patch):
    """Weights are rounded to bf16 after each update."""

    def rounded(optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.copy_(p.bfloat16())

    patch(update, "make", after(rounded))


@bug("pp=2", "clipping", both=True, recipe={"train.dtype": "float32"})
def a33_fused_clipping_inverted(patch):
    """A fused optimiser multiplies where it should divide."""
    patch(update, "excess", lambda norm, limit: 1 / EXCESS(norm, limit))


@bug("pp=2", "clipping", both=True)
def a41_clipped_by_the_norm_of_the_step_before(patch):
    """The norm is fetched before it is there."""

    def late(optimizer, slots, norm, limit):
        before, optimizer.last_norm = getattr(optimizer, "last_norm", norm), norm
        STEP(optimizer, slots, before, limit)

    patch(update, "clip_and_step", late)


@bug("pp=2", "partial_norm", both=True)
def a47_norm_without_vectors(patch):
    """The norm is taken over the matrices' parameter group."""
    patch(ByTensor, "_squares", only_matrices)


# Validation, data, saving, resuming -----------------------------------------------------------------------------


@bug("tp=2", "validation")
def a21_validation_loss_times_tp(patch):
    """All ranks of tp add the same losses."""

    def times(run, *given):
        loss, metrics = EVALUATE(run, *given)
        return loss * run.mesh.tp.size, metrics

    patch(stretch, "evaluate", times)


@bug("pp=2", "validation", both=True)
def a22_validation_with_dropout(patch):
    """The model is validated as it is trained."""

    def play(self, row, leaves, weight, seed):
        return PLAY(self, row, leaves, weight, 3 if seed is None else seed)

    patch(StagePlayer, "play", play)


@bug("pp=2", "wrong_samples", both=True)
def a10_one_key_for_a_block(patch):
    """Sample numbers are computed for a block of steps with the key of the epoch in which it begins."""

    def one_key(seed, positions, samples):
        line = positions.astype("uint64")
        keys = order._round_keys(seed, line[:1] // samples)
        return order._permute(line % samples, keys, samples).astype("int64")

    patch(dataset, "samples_at", one_key)


@bug("shard=2", "resume", "checkpoint", "lost_between_steps")
def a15_rows_of_cut_blocks_swapped(patch):
    """What does not begin at the first row is put the wrong way round."""

    def copy(stored, item):
        COPY(stored, item)
        target = item.piece.tensor.detach()
        if item.block.start and item.block.start[0] and target.dim():
            target.copy_(target.flip(0))

    patch(read, "_copy", copy)


@bug("dp=2", "resume", both=True)
def a03_resumed_one_step_late(patch):
    """The rate and the data go on one step further."""

    def load(folder, pieces):
        saved = LOAD(folder, pieces)
        return saved | {"step": saved["step"] + 1} if "step" in saved else saved

    patch(run_state, "load", load)


@bug("dp=2", "resume", both=True)
def a04_adams_counter_not_restored(patch):
    """The optimiser's count of updates begins anew."""

    def load(folder, pieces):
        for box in pieces:
            if box.name.endswith("/step"):
                box.tensor.zero_()
        return LOAD(folder, [box for box in pieces if not box.name.endswith("/step")])

    patch(run_state, "load", load)


@bug("dp=2", "resume", both=True)
def a59_rate_counted_from_the_resume(patch):
    """The schedule begins anew."""

    def restore(run, folder):
        saved, rate = RESTORE(run, folder), run.update.rate
        run.update.rate = lambda step: rate(step - saved["step"])
        return saved

    patch(stretch, "restore", restore)
