"""Of tensor parallelism: parts that are not equal, keys that are lent, and ranks in rows and columns."""

from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import torch

from tests.verify.mutations.in_data import rank
from tests.verify.mutations.planting import bug
from unisono.models.gpt.net import Attention
from unisono.parallel import chunks, tensor
from unisono.parallel.chunks import Chunks, ColumnProduct, Scattering
from unisono.parallel.heads import LentKeys
from unisono.parallel.tensor import ColumnLinear
from unisono_contrib.parallel import grid
from unisono_contrib.parallel.grid import GridProduct

ODD = MappingProxyType(
    {
        "model.n_layer": 2, "model.n_head": 8, "model.n_kv_head": 4, "model.d_model": 24, "model.context": 11,
        "train.global_batch": 12,
    }
)  # fmt: skip
PAIRS = MappingProxyType({**ODD, "train.micro_batch": 2})
GATHER, SCATTER, OWN = tensor.gather_dealt, grid.scattered, grid._own_samples
APART, COLUMN, BACK = Attention.apart, ColumnLinear.__init__, LentKeys.backward
PLACES, LANDED, TO_COLUMN, START = (
    Chunks.places,
    Scattering.landed,
    ColumnProduct.backward,
    chunks._start_gather,
)
PRODUCT, WHOLE, NORMED = GridProduct.backward, grid.whole_of, grid.GridNormed.forward


@bug("dp=2 tp=3", "forward", recipe=ODD)
def filled_up_rows_taken_for_positions(patch):
    """A shorter slice of positions travels with a row of zeros, and the zeros are kept in the place of its first row."""

    def gather(x, group, ends):
        most = tensor.longest(ends)
        room = x.new_zeros((most, *x.shape[1:]))
        room[most - len(x) :] = x
        parts = group.all_gather(room).split(most)
        return torch.cat([part[: b - a] for part, (a, b) in zip(parts, pairwise(ends), strict=True)])

    patch(tensor, "gather_dealt", gather)


@bug("pp=2 tp=3", "gradient", "not_reduced", "rank_slice", recipe=ODD)
def gradients_of_lent_keys_stay_with_who_borrowed(patch):
    """The owner of a key hears nothing of the gradients that queries on other ranks have for it."""

    def backward(ctx, grad):
        held = ctx.held
        ctx.held = replace(held, first=None)
        return BACK(ctx, grad)

    patch(LentKeys, "backward", staticmethod(backward))


@bug("tp=3 recompute=full", "forward", recipe={**ODD, "model.n_kv_head": 1})
def keys_borrowed_from_the_next_rank(patch):
    """A key is asked of the next rank, which is right where two ranks share it; here three do."""

    def init(self, *given, **named):
        COLUMN(self, *given, **named)
        self.heads = [
            one if one.owner is None else replace(one, owner=i + 1) for i, one in enumerate(self.heads)
        ]

    patch(ColumnLinear, "__init__", init)


@bug("dp=2 tp=3", "forward", recipe=ODD)
def queries_dealt_evenly_to_their_keys(patch):
    """Two keys have three queries: the second one belongs to the second key, it is thought."""

    def apart(self, qkv):
        q, k, v = APART(self, qkv)
        if len(set(self.counts)) > 1:
            k, v = k.flip(1), v.flip(1)
        return q, k, v

    patch(Attention, "apart", apart)


@bug("pp=2 tp=2x2", "gradient", "not_reduced", recipe=PAIRS)
def weights_of_a_grid_not_summed_over_rows(patch):
    """Each row's samples give a term of a block's gradient; a rank keeps that of its own."""

    def scattered(x, group, dim, ends):
        if dim != 1:
            return SCATTER(x, group, dim, ends)
        return x.narrow(1, ends[group.index], ends[group.index + 1] - ends[group.index]).contiguous()

    patch(grid, "scattered", scattered)


@bug("tp=2x2", "forward", recipe=PAIRS)
def moments_of_this_columns_features_alone(patch):
    """A norm divides by the deviation of the features that are here."""

    class Alone:
        def __init__(self, group):
            self.group = group

        def all_reduce(self, x):
            return x * self.group.size

    def forward(ctx, x, group, *rest):
        y = NORMED(ctx, x, Alone(group), *rest)
        ctx.group = group
        return y

    patch(grid.GridNormed, "forward", staticmethod(forward))


@bug("dp=2 tp=2x2", "loss_reduction", "forward", "factor_of_axis", recipe=PAIRS)
def loss_of_the_first_row_alone(patch):
    """The loss of one row's samples is taken for that of all; gradients are right."""
    patch(grid, "summed", lambda x, group: x.clone())


@bug("dp=2 tp=2x2", "masks_differ", recipe=PAIRS)
def rows_draw_the_masks_of_the_first_samples(patch):
    """Dropout is told all samples of the micro-batch, and takes the first ones for those that are here."""

    def own(stage, given, part):
        x, noise = given
        y, _ = OWN(stage, (x, None), part)
        if noise is not None:
            noise = replace(noise, samples=noise.samples[: part[1]])
        return y, noise

    patch(grid, "_own_samples", own)


@bug("shard=2 tp=2x2", "permuted", "forward", recipe=PAIRS)
def vectors_of_a_column_put_together_the_other_way_round(patch):
    """Biases and norms lie in blocks over the rows, which gather them from the last to the first."""

    def whole(x, group, dim, ends):
        made = WHOLE(x, group, dim, ends)
        return torch.cat(made.chunk(group.size)[::-1]) if x.dim() == 1 else made

    patch(grid, "whole_of", whole)


@bug("tp=2x2 cp=2", "not_reduced", "gradient", recipe={**PAIRS, "model.context": 12})
def blocks_of_a_grid_not_summed_over_cp(patch):
    """Ranks of cp have seen other positions each, which one of them is not told."""
    from unisono_contrib.parallel.grid import Dealt

    patch(grid, "Dealt", lambda cuts, apart, over, group: Dealt(cuts, apart, over, _alone(group)))


def _alone(group):
    from unisono.comm.group import Group

    return Group(group.axis, [rank()], 0, None, group.recorder)


@bug("pp=2 tp=3:chunks=2", "permuted", "forward", recipe=ODD)
def chunks_laid_end_to_end(patch):
    """A chunk has some positions of each rank, and is put down as if it were a piece of the sample."""

    def places(self, cut):
        own, first = (
            PLACES(self, cut),
            sum(p.stop - p.start for c in self.cuts if c < cut for p in PLACES(self, c)),
        )
        sizes = [0, *(p.stop - p.start for p in own)]
        starts = [first + sum(sizes[: i + 1]) for i in range(len(own))]
        return [slice(a, a + n) for a, n in zip(starts, sizes[1:], strict=True)]

    patch(Chunks, "places", places)


@bug("dp=2 tp=2:chunks=2", "forward", recipe=ODD)
def chunk_multiplied_before_it_has_come(patch):
    """Both chunks arrive in one buffer: the second overwrites the first before that is multiplied."""
    room = {}

    def start(x, cut, group):
        flight, out = START(x, cut, group)
        key = rank(), tuple(out.shape), x.data_ptr()
        here = room.setdefault(key, out)
        if here is not out:
            flight.land()
            here.copy_(out)
            flight.land = lambda: None
        return flight, here

    patch(chunks, "_start_gather", start)


@bug("tp=2:chunks=3 recompute=full", "gradient", "not_reduced", "rank_slice", "kept_activation", recipe=ODD)
def last_chunk_of_gradients_never_waited_for(patch):
    """Backward returns with the last flight in the air: these positions have this rank's term alone."""

    def landed(self):
        *_, (_, parts, made) = self.flights
        out = LANDED(self)
        if made.requires_grad or torch._C._current_graph_task_id() == -1:
            return out
        a = self.chunks.cuts[-1][0]
        own = parts[self.chunks.group.index].view(self.batch, -1, self.width)
        out[:, a:] = own[:, : out.shape[1] - a]
        return out

    patch(Scattering, "landed", landed)
