"""Tables of a recommender: rows looked up at the wrong rank, sparse gradients that lose terms, rows stepped unasked."""

import torch

from tests.verify.mutations.in_data import rank
from tests.verify.mutations.planting import bug
from unisono.parallel.tensor import Crossing
from unisono_contrib.parallel import tables
from unisono_contrib.parallel.tables import DealtTables, WholeTables
from unisono_contrib.train.step import lazy, rows

CLICKS = {
    "model.kind": "dlrm", "model.tables": (24, 12, 6), "model.lookups": 2, "model.d_table": 6, "model.n_dense": 4,
    "model.bottom": (8,), "model.top": (8,), "data.source": "clicks:samples=400", "train.global_batch": 12,
    "train.weight_decay": 0.1,
}  # fmt: skip
BY_ROW = {**CLICKS, "model.table_sharding": "row"}
BY_COLUMN = {**CLICKS, "model.table_sharding": "column"}
ADD_UP, TOUCHED = rows.add_up, lazy.touched
ASK, FORWARD, SWAP = DealtTables.everybodys, WholeTables.forward, tables.swap


@bug("dp=2", "replicas_drifted", "not_reduced", "missing_share", recipe=CLICKS)
def replicas_of_tables_never_meet(patch):
    """Sparse gradients are left out of the buckets, and nobody else sums them."""
    patch(rows, "add_up", lambda masters, groups: ADD_UP(masters, []))


@bug("dp=3 pp=2", "factor_of_axis", "factor", recipe=CLICKS)
def rows_averaged_over_replicas(patch):
    """A mean over replicas, as loops that divide by the world take it, of tables alone."""

    def add_up(masters, groups):
        ADD_UP(masters, groups)
        for p in masters:
            p.grad = (p.grad / groups[-1].size).coalesce()

    patch(rows, "add_up", add_up)


@bug("shard=4 ep=2", "replicas_drifted", "not_reduced", "missing_share", recipe=CLICKS)
def tables_held_twice_learn_apart(patch):
    """Two ranks hold each table, and rows are summed over replicas alone."""
    patch(rows, "add_up", lambda masters, groups: ADD_UP(masters, []))


@bug("dp=2 shard=2", "missing_share", "missing_micro_batch", "few_elements", "gradient", recipe=CLICKS)
def a_row_of_two_ranks_keeps_the_last(patch):
    """Rows that several ranks have read are written over each other instead of added."""

    def merged(parts, like):
        index = torch.cat([r for r, _ in parts])
        known, places = torch.unique(index, return_inverse=True)
        total = like.values().new_zeros((len(known), like.shape[1]))
        total[places] = torch.cat([values for _, values in parts])
        return rows._sparse(known[None], total, like)

    patch(rows, "_merged", merged)


@bug("dp=2 shard=2 ep=2", "initialisation", "forward", recipe=BY_ROW)
def rows_dealt_from_the_second_on(patch):
    """A rank believes that its rows begin one later than they do."""

    def look_up(self, index_BTL):
        return ASK(self, index_BTL + (rank() % 2))

    patch(DealtTables, "everybodys", look_up)


@bug("shard=3 ep=3", "missing_share", "not_reduced", "rank_slice", "gradient", recipe=BY_COLUMN)
def gradients_of_columns_stay_at_home(patch):
    """Backward does not go across: each rank keeps the gradients of its own samples for all of them."""

    def back(self, parts):
        keep = lambda grad, group: grad
        return Crossing.apply(parts, self.group, SWAP, keep, parts.dtype)

    patch(DealtTables, "back", back)


@bug("shard=2 ep=2 pp=2", "forward", recipe=CLICKS)
def tables_come_back_in_another_order(patch):
    """Ranks are numbered the other way round where rows come back: tables change places."""

    def forward(self, index_BTL):
        return FORWARD(self, index_BTL).roll(1, 1)

    patch(WholeTables, "forward", forward)


@bug("shard=2 ep=2 dp=2", "missing_share", "not_reduced", "gradient", "wrong_share", recipe=BY_ROW)
def rows_keep_the_gradients_of_one_ranks_samples(patch):
    """The gradient of a scattered sum is gathered; here each rank gets that of its own samples for everybody's."""
    patch(tables, "gathered", lambda x, group: torch.cat([x] * group.size))


@bug("dp=2", "weight_decay", "update_rule", "moments", recipe=CLICKS)
def rows_that_nobody_read_decay(patch):
    """The update goes over the whole table, as one of a dense gradient does."""

    def touched(grad):
        whole = grad.to_dense()
        index = torch.arange(len(whole))
        return index, whole, index

    patch(lazy, "touched", touched)


@bug("dp=2 shard=2 ep=2", "weight_decay", "update_rule", "moments", "rank_slice", recipe=BY_COLUMN)
def a_rank_that_holds_columns_steps_all_rows(patch):
    """One rank of two asks for rows in another way."""

    def touched(grad):
        whole = grad.to_dense()
        index = torch.arange(len(whole))
        return TOUCHED(grad) if rank() % 2 == 0 else (index, whole, index)

    patch(lazy, "touched", touched)
