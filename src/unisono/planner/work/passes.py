"""A transformer on a host of ranks, as our own program plays it in fp32: passes, calls, weights, activations."""

from typing import Annotated

from unisono.plan import Plan
from unisono.planner.cuts import stages_of
from unisono.planner.memory import kept_of, passing, share_of
from unisono.planner.source import Source
from unisono.planner.timetables import ends, of
from unisono.planner.work.blocks import block
from unisono.planner.work.dealt import held_experts
from unisono.planner.work.inside import StageElements, leafwise, with_step
from unisono.planner.work.stage import OURS, PassCounts, RowWork, StageWork
from unisono.planner.work.transformer import Transformer, block_elements

ITEM: Annotated[float, Source("specification", "bytes of fp32, in which ranks on CPUs compute")] = 4.0
_ENDS = Source("specification", "parameters of stem and head of our GPT, counted as tensors")
END_TENSORS: Annotated[int, _ENDS] = 3
_STARTED = Source("specification", "14 of 20 kernels and 30 of 32: in fp32 nothing is cast; counted")
# Of a block's kernels those that a CPU starts, forward and backward.
STARTED: Annotated[tuple[float, float], _STARTED] = (14 / 20, 30 / 32)


def held(model: Transformer, plan: Plan) -> list[StageElements]:
    """What a rank of every stage has that one micro-batch passes."""
    counts, found = stages_of(model, plan.schedule, plan.pp), list[StageElements]()
    last, tp, (_, whole) = len(counts) - 1, plan.tp, model.block_parameters
    # Uses of a tied weight in one stage are two gradients where their sum has to wait for others.
    once = last == 0 and not leafwise(plan)
    handed = float(model.context * model.d_model / tp / plan.cp)
    for place, blocks in enumerate(counts):
        stem, head = place == 0, place == last
        ends_ = [
            part for part, here in ((model.stem_parameters, stem), (model.head_parameters, head)) if here
        ]
        rim = sum(matrix / tp + rest for matrix, rest in ends_) - (model.tied_elements / tp if once else 0)
        alone = blocks * whole + sum(rest for _, rest in ends_) if tp > 1 else 0.0
        units = ((_dealt_elements(model, plan), float(blocks)),)
        found.append(StageElements(blocks, units, rim, alone, stem, head, handed, handed))
    return found


def _dealt_elements(model: Transformer, plan: Plan) -> float:
    """Elements of one block that `shard` deals, and gathers at once; of dense and sparse blocks the mean."""
    own, (dealt, whole) = held_experts(model, plan), model.block_parameters
    routed = 0.0 if own.apart else own.matrices + own.biases
    return dealt / plan.tp + whole + model.sparse_share * routed


def stages(model: Transformer, plan: Plan, micro_batch: int, micros: int) -> tuple[StageWork, ...]:
    """Every stage of the plan's timetable."""
    chains, made = of(plan.schedule).chains, dict[StageElements, StageWork]()
    each, many = held(model, plan), max(1, micros // chains)
    for own in each:
        if own not in made:
            made[own] = _stage(model, plan, own, micro_batch, many)
    return chains * tuple(made[own] for own in each)


def _stage(model: Transformer, plan: Plan, own: StageElements, micro_batch: int, micros: int) -> StageWork:
    ahead, back = (_counted(model, plan, own.blocks, micro_batch, backward=way) for way in (False, True))
    ends_ = [_ends(model, plan, micro_batch, own.stem, own.head, way) for way in (False, True)]
    made = [with_step(model, plan, own, micro_batch, micros, backward=way) for way in (False, True)]
    return StageWork(
        ahead + ends_[0],
        back + ends_[1],
        ahead if plan.recompute == "full" else PassCounts(),
        (made[0], made[1]),
        ITEM * micro_batch * own.ahead,
    )


def _counted(
    model: Transformer, plan: Plan, layers: float, micro_batch: int, *, backward: bool
) -> PassCounts:
    """What one pass over `layers` blocks computes."""
    work, tokens = block(model, plan, OURS, micro_batch, backward=backward), micro_batch * model.context
    drawn = work.masks + tokens * model.context * model.n_head / plan.tp if model.noisy else 0.0
    return PassCounts(
        product=layers * sum(one.flops for one in work.products),
        # Half of both products of attention is masked, unless it is drawn.
        attention=layers * work.fused * (2.0 if model.noisy else 1.0),
        elementwise=layers * work.moved,
        weights=ITEM * layers * block_elements(model, plan.tp) * (2.0 if backward else 1.0),
        noise=0.0 if backward else layers * drawn,
        launch=layers * work.kernels * STARTED[backward],
    )


def _ends(
    model: Transformer, plan: Plan, micro_batch: int, stem: bool, head: bool, backward: bool
) -> PassCounts:
    """The same of stem and head."""
    n, h, tp, k = micro_batch * model.context, model.d_model, plan.tp, 2.0 if backward else 1.0
    return PassCounts(
        product=2.0 * k * n * h * model.vocab / tp if head else 0.0,
        elementwise=ITEM * n * h * (6 if backward else 4) * (stem + head) / tp,
        logits=ITEM * 3 * n * model.vocab / tp if head else 0.0,
        weights=ITEM * model.vocab * h / tp if head else 0.0,
        noise=n * h / tp if model.noisy and stem and not backward else 0.0,
        launch=(5.0 if backward else 3.0) * (stem + head),
    )


def row_works(model: Transformer, plan: Plan, micro_batch: int, micros: int) -> tuple[RowWork, ...]:
    """Every row of the pipeline."""
    return tuple(_row(model, plan, micro_batch, row) for row in range(plan.pp))


def _row(model: Transformer, plan: Plan, micro_batch: int, row: int) -> RowWork:
    share = share_of(model, plan, row, True)
    each, owed, working = passing(share, kept_of(model, plan, OURS, micro_batch))
    return RowWork(
        elements=share.blocks + share.ends + share.routed,
        tensors=model.block_tensors * model.n_layer / plan.pp + END_TENSORS,
        kept=each,
        working=working,
        owed=owed,
        unit=ITEM * block_elements(model, plan.tp),
        rim=ITEM * share.ends,
        widest=ITEM * model.d_model * max(model.d_ff, model.vocab) / plan.tp,
        piece=ITEM * micro_batch * model.context * model.d_model,
    )


def tied(model: Transformer, plan: Plan) -> float:
    """Bytes of the gradient of a weight that both ends have, where these lie on two rows."""
    stems, heads = ends(plan.schedule, plan.pp)
    return ITEM * model.vocab * model.d_model / plan.tp if model.tied and stems != heads else 0.0
