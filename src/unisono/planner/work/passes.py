"""A transformer on a host of ranks, as our own program plays it in fp32: passes, calls, weights, activations."""

from typing import Annotated

from unisono.plan import Plan
from unisono.plan.grid import Grid
from unisono.planner.alike import Alike, in_order, in_rows, in_stages, is_uniform
from unisono.planner.cuts import rows_of, stages_of
from unisono.planner.machines.order import virtual_of
from unisono.planner.memory import kept_in, passing, share_in
from unisono.planner.source import Source
from unisono.planner.timetables import ends, of
from unisono.planner.work import virtual
from unisono.planner.work.blocks import again as made_again
from unisono.planner.work.blocks import block
from unisono.planner.work.dealt import held_experts
from unisono.planner.work.inside import StageElements, leafwise, with_step
from unisono.planner.work.stage import OURS, PassCounts, RowWork, StageWork
from unisono.planner.work.transformer import Transformer, block_elements, on_rank

ITEM: Annotated[float, Source("specification", "bytes of fp32, in which ranks on CPUs compute")] = 4.0
_ENDS = Source("specification", "parameters of stem and head of our GPT, counted as tensors")
END_TENSORS: Annotated[int, _ENDS] = 3
_STARTED = Source("specification", "14 of 20 kernels and 30 of 32: in fp32 nothing is cast; counted")
# Of a block's kernels those that a CPU starts, forward and backward.
STARTED: Annotated[tuple[float, float], _STARTED] = (14 / 20, 30 / 32)
_PIECED = Source(
    "specification",
    "parallel.online: kernels of one piece beside its attention, forward and backward; counted",
)
PIECE: Annotated[tuple[float, float], _PIECED] = (10.0, 5.0)


def held(model: Transformer, plan: Plan) -> list[StageElements]:
    """What a rank of every stage has that one micro-batch passes."""
    counts, found = stages_of(model, plan.schedule, plan.pp), list[StageElements]()
    last, tp, (dealt, whole) = len(counts) - 1, plan.tp, model.block_parameters
    # Uses of a tied weight in one stage are two gradients where their sum has to wait for others, or is rounded.
    once = last == 0 and not leafwise(plan) and not plan.arithmetic.narrow
    by_shards, handed = virtual_of(plan) > 1, handed_elements(model, plan)  # every pass adds up its own
    for place, (blocks, alike) in enumerate(zip(counts, in_stages(model, plan), strict=True)):
        stem, head = place == 0, place == last
        ends_ = [
            part for part, here in ((model.stem_parameters, stem), (model.head_parameters, head)) if here
        ]
        rim = sum(on_rank(tp, *end) for end in ends_) - (model.tied_elements / tp if once else 0)
        apart = tp > 1 and not isinstance(tp, Grid) and not by_shards
        alone = blocks * whole + sum(rest for _, rest in ends_) if apart else 0.0
        alone += sum(one.blocks * dealt for one in alike if one.plan.tp < tp)
        kinds = tuple((one, dealt_elements(model, one.plan)) for one in alike)
        units = tuple((elements, one.blocks) for one, elements in kinds)
        uniform = is_uniform(plan)
        parts = float(blocks), units, rim, alone, stem, head, handed, handed
        found.append(StageElements(*parts, kinds=() if uniform else kinds))
    return found


def handed_elements(model: Transformer, plan: Plan) -> float:
    """Of a sample, what goes from stage to stage: by virtual shards positions are whole on tp."""
    return model.context * model.d_model / (plan.tp if virtual_of(plan) == 1 else 1) / plan.cp


def dealt_elements(model: Transformer, plan: Plan) -> float:
    """Elements of one block that `shard` deals, and gathers at once; of dense and sparse blocks the mean."""
    own, (dealt, whole) = held_experts(model, plan), model.block_parameters
    routed = 0.0 if own.apart else own.matrices + own.biases
    return on_rank(plan.tp, dealt, whole) + model.sparse_share * routed


def each_block(model: Transformer, plan: Plan, blocks: float, row: int) -> list[tuple[Plan, float]]:
    """(the plan that plays all blocks so, its part of `blocks`, which are all of a row): of each block, by elements."""
    ways = in_order(model, plan, row)
    weights = [dealt_elements(model, way) for way in ways]
    each = blocks / sum(weights)  # of rows with two copies of their blocks, and of uneven ones the mean
    return [(way, each * one) for way, one in zip(ways, weights, strict=True)]


def stages(model: Transformer, plan: Plan, micro_batch: int, micros: int) -> tuple[StageWork, ...]:
    """Every stage of the plan's timetable."""
    chains, made = of(plan.schedule).chains, dict[StageElements, StageWork]()
    each, many = held(model, plan), max(1, micros // chains)
    for own in each:
        if own not in made:
            made[own] = _stage(model, plan, own, micro_batch, many)
    return chains * tuple(made[own] for own in each)


def _stage(model: Transformer, plan: Plan, own: StageElements, micro_batch: int, micros: int) -> StageWork:
    kinds = [one for one, _ in own.kinds] or [Alike(plan, own.blocks)]
    ahead, back, again = PassCounts(), PassCounts(), PassCounts()
    for alike, blocks in kinds:
        forward = _counted(model, alike, blocks, micro_batch, backward=False)
        ahead, back = ahead + forward, back + _counted(model, alike, blocks, micro_batch, backward=True)
        again = again + (forward if alike.recompute == "full" else PassCounts())
        if (
            alike.recompute == "selective" and virtual_of(plan) > 1
        ):  # else attention is fused, and nobody counts it
            again = again + _attention_again(model, alike, blocks, micro_batch)
    ends_ = [_ends(model, plan, micro_batch, own.stem, own.head, way) for way in (False, True)]
    made = [with_step(model, plan, own, micro_batch, micros, backward=way) for way in (False, True)]
    return StageWork(
        ahead + ends_[0],
        back + ends_[1],
        again,
        (made[0], made[1]),
        ITEM * micro_batch * own.ahead,
    )


def _attention_again(model: Transformer, plan: Plan, layers: float, micro_batch: int) -> PassCounts:
    work = made_again(model, plan, OURS, micro_batch)
    flops = sum(one.flops for one in work.scores)
    return PassCounts(attention=layers * flops, elementwise=layers * work.moved, launch=layers * work.kernels)


def _counted(
    model: Transformer, plan: Plan, layers: float, micro_batch: int, *, backward: bool
) -> PassCounts:
    """What one pass over `layers` blocks computes."""
    work, tokens = block(model, plan, OURS, micro_batch, backward=backward), _tokens(model, plan, micro_batch)
    weighed, beside = tokens * model.context * model.n_head / plan.tp, 0.0
    if virtual_of(plan) > 1:
        weighed = virtual.score_elements(model, plan, micro_batch)
        beside = virtual.kernels(model, plan, OURS, backward)  # which are not among the usual ones
    drawn = work.masks + weighed if model.noisy else 0.0
    return PassCounts(
        product=layers * sum(one.flops for one in work.products),
        # Half of both products of attention is masked, unless it is drawn.
        attention=layers * (work.fused * (2.0 if model.noisy else 1.0) + sum(p.flops for p in work.scores)),
        elementwise=layers * work.moved,
        weights=ITEM * layers * _read(model, plan) * (2.0 if backward else 1.0),
        noise=0.0 if backward else layers * drawn,
        launch=layers
        * ((work.kernels - beside) * STARTED[backward] + beside + _pieces(plan) * PIECE[backward]),
    )


def _read(model: Transformer, plan: Plan) -> float:
    """Elements of a block's weights that products read: in a grid those of all ranks of a column; by virtual shards
    once for each stretch of the positions."""
    rows = plan.tp.rows if isinstance(plan.tp, Grid) else max(1, virtual_of(plan) // plan.cp)
    return rows * block_elements(model, plan.tp)


def _tokens(model: Transformer, plan: Plan, micro_batch: float) -> float:
    """Of one micro-batch on one rank."""
    return micro_batch * model.context / plan.cp


def _pieces(plan: Plan) -> float:
    """Pieces of queries and keys that a rank of cp attends with one by one: of its own two stretches of positions
    three, of every other rank's two (see parallel.attend). A rank of ulysses attends at once; virtual shards have their
    own."""
    alone = plan.cp == 1 or plan.cp_kind == "ulysses" or virtual_of(plan) > 1
    return 0.0 if alone else 2.0 * plan.cp + 1.0


def _ends(
    model: Transformer, plan: Plan, micro_batch: int, stem: bool, head: bool, backward: bool
) -> PassCounts:
    """The same of stem and head."""
    n, h, tp, k = _tokens(model, plan, micro_batch), model.d_model, plan.tp, 2.0 if backward else 1.0
    launch = (5.0 if backward else 3.0) * (stem + head)
    if virtual_of(plan) > 1:
        own = virtual.shards_of(model, plan, micro_batch)
        for end in [False] * stem + [True] * head:
            launch += virtual.end_kernels(own, head=end, backward=backward)
    return PassCounts(
        product=2.0 * k * n * h * model.vocab / tp if head else 0.0,
        elementwise=ITEM * n * h * (6 if backward else 4) * (stem + head) / tp,
        logits=ITEM * 3 * n * model.vocab / tp if head else 0.0,
        weights=ITEM * model.vocab * h / tp if head else 0.0,
        noise=n * h / tp if model.noisy and stem and not backward else 0.0,
        launch=launch,
    )


def row_works(model: Transformer, plan: Plan, micro_batch: int, micros: int) -> tuple[RowWork, ...]:
    """Every row of the pipeline."""
    return tuple(_row(model, plan, micro_batch, row) for row in range(plan.pp))


def _row(model: Transformer, plan: Plan, micro_batch: int, row: int) -> RowWork:
    cut = rows_of(model, plan.schedule, plan.pp, True)
    share = share_in(model, plan, row, cut)
    each, owed, working = passing(share, kept_in(model, plan, OURS, micro_batch, row, cut))
    kinds = in_rows(model, plan, cut)[row]
    return RowWork(
        elements=share.blocks + share.ends + share.routed,
        tensors=model.block_tensors * model.n_layer / plan.pp + END_TENSORS,
        kept=each,
        working=working,
        owed=owed,
        unit=ITEM * max(block_elements(model, one.plan.tp) for one in kinds),
        rim=ITEM * share.ends,
        widest=ITEM * model.d_model * max(model.d_ff, model.vocab) / plan.tp,
        piece=ITEM * _tokens(model, plan, micro_batch) * model.d_model,
        apart=share.apart,
    )


def tied(model: Transformer, plan: Plan) -> float:
    """Bytes of the gradient of a weight that both ends have, where these lie on two rows."""
    stems, heads = ends(plan.schedule, plan.pp)
    return ITEM * model.vocab * model.d_model / plan.tp if model.tied and stems != heads else 0.0
