"""Of what is computed again or lies elsewhere: what comes back is not what was put away, on some rank."""

import torch

from tests.verify.mutations.in_data import rank
from tests.verify.mutations.planting import WIDE, bug
from unisono.models.noise import Dropout
from unisono.parallel.offload import keeping, streaming
from unisono.parallel.offload.keeping import Keeper
from unisono.parallel.offload.store import Store
from unisono.parallel.offload.streaming import _Streamed
from unisono.train.build import build

BITS, PUT, PACK, SEND = Dropout.bits, Store.put, Keeper._pack, build.send_home
FETCH, STREAMED, INIT = Store.fetch, _Streamed.step, keeping.Entry.__init__


def in_backward():
    return torch._C._current_graph_task_id() != -1


@bug("dp=2 tp=2 recompute=selective", "kept_activation", "rank_slice", recipe=WIDE)
def attention_computed_again_drops_others(patch):
    """What is computed again draws new masks on the second rank, as from a generator that has moved on."""

    def bits(self, shape, noise):
        found = BITS(self, shape, noise)
        return found.flip(-1) if rank() % 2 and in_backward() else found

    patch(Dropout, "bits", bits)


@bug("dp=2 pp=2 offload=activations:to=disk", "kept_activation", recipe=WIDE)
def homes_given_away_while_they_are_needed(patch):
    """A home is free again as soon as something lies there: the next activation of its size comes to lie on it."""

    def init(self, store, home, passing, frame):
        INIT(self, store, home, passing, frame)
        if passing and rank() >= 2:
            store.leave(home)
            store.away += home.bytes.numel()

    patch(keeping.Entry, "__init__", init)


@bug("dp=2 shard=2 offload=activations", "kept_activation", "precision_lost", recipe=WIDE)
def activations_at_home_in_fewer_bytes(patch):
    """What is put away is rounded to bfloat16 on the way, on one replica."""

    def fetch(self, home):
        there = FETCH(self, home)
        if rank() == 1 and in_backward() and there.numel() % 8 == 0:
            numbers = there.view(torch.float64)
            numbers.copy_(numbers.bfloat16())
        return there

    patch(Store, "fetch", fetch)


@bug("dp=2 tp=2 offload=params:to=disk", "tied_copies_differ", "not_updated", "stale_parameters", recipe=WIDE)
def uses_of_a_tied_weight_have_each_a_home(patch):
    """Homes are given by name, not by storage: what the optimiser steps is the first use, and the second stays."""
    patch(build, "send_home", lambda params, store: [SEND([p], store) for p in params])


@bug("dp=2 pp=2 offload=params", "not_updated", "stale_parameters", "tied_copies_differ", recipe=WIDE)
def weights_of_the_last_stage_never_go_home(patch):
    """Streamed out, stepped, and not brought back: the next step fetches what was there."""

    def step(self, closure=None):
        put = (
            PUT
            if rank() < 2
            else lambda store, x, home: None if getattr(self, "busy", False) else PUT(store, x, home)
        )
        self.store.put = put.__get__(self.store)
        self.busy = True
        try:
            STREAMED(self, closure)
        finally:
            self.busy = False
            del self.store.put

    patch(_Streamed, "step", step)


@bug("shard=3 offload=optimizer:to=disk", "rank_slice", "not_updated", "step_count", recipe=WIDE)
def last_part_never_streams_in(patch):
    """Parameters are stepped a few at a time, and the loop ends one part early on the last rank."""
    parts = streaming.parts_of

    def fewer(params, optimizer):
        each = [[p] for part in parts(params, optimizer) for p in part]
        return each[:-1] if rank() == 2 else each

    patch(streaming, "parts_of", fewer)


@bug("dp=2 offload=optimizer", "moments", "update_rule", recipe=WIDE, optimizer="adamw")
def moments_begin_anew_in_every_step(patch):
    """State is fetched, and what comes is empty."""
    patch(Store, "fetch", lambda self, home: torch.zeros_like(FETCH(self, home)))


@bug("tp=2 offload=params recompute=selective", "kept_activation", "gradient", recipe=WIDE)
def backward_fetches_another_blocks_weights(patch):
    """The home of a weight is looked up by its shape: of equal blocks the last one answers."""
    seen = {}

    def pack(self, frame, own, known, x):
        found = PACK(self, frame, own, known, x)
        if rank() == 1 and not isinstance(found, torch.Tensor) and not found.entry._passing:
            key = id(self.store), tuple(found.layout)
            found.entry._home = seen.setdefault(key, found.entry._home)
        return found

    patch(Keeper, "_pack", pack)


@bug("dp=2 tp=2 offload=activations:to=disk", "kept_activation", "rank_slice", recipe=WIDE)
def the_first_micro_batchs_activations_come_back_twice(patch):
    """What is fetched is known by its size and its turn in the graph, and the first that came so is there already."""
    fetched = {}

    def fetch(self, home):
        there = FETCH(self, home)
        if rank() != 3 or not in_backward():
            return there
        return fetched.setdefault((id(self), there.numel()), there).clone()

    patch(Store, "fetch", fetch)
