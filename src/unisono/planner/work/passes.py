"""A transformer on a host of ranks, as our own program plays it in fp32: its passes, collectives, weights, activations.

Bytes of elementwise kernels are those of the program's own: norms, residual sums, activation, the heads' transposition.
"""

from typing import Annotated

from unisono.plan import Plan
from unisono.planner.cuts import stages_of
from unisono.planner.memory import share_of
from unisono.planner.source import Source
from unisono.planner.timetables import ends, of
from unisono.planner.work import kept, sparse
from unisono.planner.work.stage import PassCall, PassCounts, RowWork, StageWork
from unisono.planner.work.transformer import Transformer, block_bytes

ITEM: Annotated[float, Source("specification", "bytes of fp32, in which ranks on CPUs compute")] = 4.0
_ENDS = Source("specification", "parameters of stem and head of our GPT, counted as tensors")
END_TENSORS: Annotated[int, _ENDS] = 3


def stages(model: Transformer, plan: Plan, micro_batch: int, micros: int) -> tuple[StageWork, ...]:
    """Every stage of the plan's timetable. Blocks are cut as the program cuts: the dearest row is cheapest."""
    blocks, schedule = stages_of(model, plan.schedule, plan.pp), of(plan.schedule)
    placement = schedule.placement(plan.pp)
    last, made = len(placement) // schedule.chains - 1, dict[tuple[float, bool, bool], StageWork]()
    found: list[StageWork] = []
    for stage in range(len(placement)):
        place = stage % (last + 1)
        key = blocks[place], place == 0, place == last
        if key not in made:
            made[key] = _stage(model, plan, micro_batch, max(1, micros // schedule.chains), *key)
        found.append(made[key])
    return tuple(found)


def _stage(
    model: Transformer, plan: Plan, micro_batch: int, micros: int, layers: float, stem: bool, head: bool
) -> StageWork:
    sizes = {"layers": layers, "stem": stem, "head": head}
    again = plan.recompute == "full"
    return StageWork(
        counted(model, micro_batch, plan.tp, backward=False, **sizes),
        counted(model, micro_batch, plan.tp, backward=True, **sizes),
        counted(model, micro_batch, plan.tp, backward=False, layers=layers) if again else PassCounts(),
        (
            tuple(_calls(model, plan, micro_batch, micros, layers, (stem, head), backward=False)),
            tuple(_calls(model, plan, micro_batch, micros, layers, (stem, head), backward=True)),
        ),
        micro_batch * model.context * model.d_model / plan.tp * ITEM,
    )


def counted(
    model: Transformer, micro_batch: int, tp: int, *, backward: bool, layers: float, stem: bool = False,
    head: bool = False,
) -> PassCounts:  # fmt: skip
    """What one pass over `layers` blocks computes, and stem and head if they are here."""
    n, h, k = micro_batch * model.context, model.d_model, 2.0 if backward else 1.0
    shared = 2.0 * n * h / tp  # norms and sums are dealt over tp by positions
    dense, share = 1.0 - model.sparse_share, model.sparse_share
    products = sum(inner * columns for inner, columns, _, _ in model.attention_products)
    products += dense * (3 if model.gated else 2) * h * model.d_ff
    # Both products of attention; half is masked, unless it is drawn.
    scores = n * model.context * model.n_head * sum(model.score_widths) / tp * (2.0 if model.noisy else 1.0)
    active = (5 if model.gated else 3) if backward else (3 if model.gated else 2)
    moved = shared * (7 if backward else 5) + n * (active * dense * model.d_ff + 2 * model.qkv_width) / tp
    flops, launch = 2.0 * n * products / tp, 30.0 if backward else 14.0
    if model.experts:
        shapes = sparse.products(model, model.experts, n, tp, 1)
        flops += share * sum(2.0 * rows * inner * columns * many for rows, inner, columns, many in shapes)
        moved += share * sparse.moved(model, model.experts, n, tp, 1, int(ITEM), active * int(ITEM)) / ITEM
        launch += share * sparse.LAUNCHES * k
    drawn = (n * h * 2 / tp + n * model.context * model.n_head / tp) if model.noisy and not backward else 0.0
    found = PassCounts(
        product=k * layers * flops,
        attention=(2.5 if backward else 1.0) * layers * scores,
        elementwise=ITEM * layers * moved,
        weights=ITEM * k * layers * block_elements(model, tp),
        noise=layers * drawn,
        launch=launch * layers,
    )
    return found + _ends(model, n, tp, k, stem, head, backward) if stem or head else found


def _ends(
    model: Transformer, n: float, tp: int, k: float, stem: bool, head: bool, backward: bool
) -> PassCounts:
    """The same of stem and head, on `n` tokens."""
    h = model.d_model
    return PassCounts(
        product=2.0 * k * n * h * model.vocab / tp if head else 0.0,
        elementwise=ITEM * n * h * (6 if backward else 4) * (stem + head) / tp,
        logits=ITEM * 3 * n * model.vocab / tp if head else 0.0,
        weights=ITEM * model.vocab * h / tp if head else 0.0,
        noise=n * h / tp if model.noisy and stem and not backward else 0.0,
        launch=(10.0 if backward else 6.0) / 2 * (stem + head),
    )


def block_elements(model: Transformer, tp: int) -> float:
    """Elements of one block on one rank of tp, before `shard` deals them; of dense and sparse blocks the mean."""
    dealt, whole = model.block_parameters
    return (dealt + model.sparse_share * model.layer_experts) / tp + whole


def _calls(
    model: Transformer, plan: Plan, micro_batch: int, micros: int, layers: float, ends: tuple[bool, bool], *,
    backward: bool,
) -> list[PassCall]:  # fmt: skip
    """Collectives inside one pass, as the program makes them. ends: whether stem and head are here."""
    (stem, head), found = ends, list[PassCall]()
    if plan.tp > 1:
        moved = micro_batch * model.context * model.d_model * ITEM
        tokens = micro_batch * model.context * ITEM
        gathers = 2 if model.gated else 1  # gate and up gather their input each
        first, second = layers * (1.0 + gathers), layers * 2.0  # what a forward pass gathers, and scatters
        gather, scatter = (second + stem, first + head) if backward else (first + head, second + stem)
        if backward and plan.recompute == "full":
            # Up to the last tensor that is kept: without dropout that comes before what the second half scatters.
            gather, scatter = gather + first, scatter + layers * (2 if model.noisy else 1)
        found += [
            PassCall("tp", "all_gather", moved, gather),
            PassCall("tp", "reduce_scatter", moved, scatter),
        ]
        if head and not backward:  # of the loss: the largest logit, then the sum and the target's
            found += [PassCall("tp", "all_reduce", size, 1.0) for size in (tokens, 2 * tokens)]
        if backward:  # gradients of what every rank has whole
            whole = layers * model.block_parameters[1]
            whole += stem * model.stem_parameters[1] + head * model.head_parameters[1]
            found.append(PassCall("tp", "all_reduce", ITEM * whole / plan.shard, 1.0 / micros))
    if plan.shard > 1:
        rim = ITEM * share_of(model, plan, 0 if stem else plan.pp - 1, True).ends if stem or head else 0.0
        found += sharded(plan, [(ITEM * block_elements(model, plan.tp), layers)], rim, micros, backward)
    return [call for call in found if call.nbytes * call.times > 0]


def sharded(
    plan: Plan, units: list[tuple[float, float]], rim: float, micros: int, backward: bool
) -> list[PassCall]:
    """Collectives on shard of one pass. units: (bytes, how many there are) of what is gathered at once, between the
    ends; rim: bytes of the ends, which stay gathered until the backward pass is over."""
    once, deals = 1.0 / micros, plan.zero == 3
    if not backward:
        gathers = 1.0 if deals else once
        return [PassCall("shard", "all_gather", size, many * gathers) for size, many in [*units, (rim, 1.0)]]
    scatters = once if plan.zero == 1 else 1.0
    gathered = [PassCall("shard", "all_gather", size, many) for size, many in units] if deals else []
    return gathered + [
        PassCall("shard", "reduce_scatter", size, many * scatters) for size, many in [*units, (rim, 1.0)]
    ]


def row_works(model: Transformer, plan: Plan, micro_batch: int, micros: int) -> tuple[RowWork, ...]:
    """Every row of the pipeline."""
    return tuple(_row(model, plan, micro_batch, row) for row in range(plan.pp))


def _row(model: Transformer, plan: Plan, micro_batch: int, row: int) -> RowWork:
    share, schedule = share_of(model, plan, row, True), of(plan.schedule)
    whole, layers = _kept(model, plan, micro_batch, "none"), share.layers
    working, owed = whole if plan.recompute == "full" else 0.0, 0.0
    if row in ends(plan.schedule, plan.pp)[1]:
        # Of one micro-batch the logits, their log-probabilities and the gradient of these.
        working += 3.0 * ITEM * micro_batch * model.context * model.vocab / plan.tp
        # Where all forward passes come first, every other micro-batch keeps what its loss is made from.
        if schedule.heaped:
            owed = kept.head_bytes(model, micro_batch, plan.tp)
        elif schedule.late:
            owed = kept.owed_bytes(model, micro_batch, plan.tp)
    return RowWork(
        elements=share.blocks + share.ends + share.routed,
        tensors=model.block_tensors * model.n_layer / plan.pp + END_TENSORS,
        kept=layers * _kept(model, plan, micro_batch, plan.recompute),
        working=working,
        owed=owed,
        unit=ITEM * block_elements(model, plan.tp),
        rim=ITEM * share.ends,
        widest=ITEM * model.d_model * max(model.d_ff, model.vocab) / plan.tp,
        piece=ITEM * micro_batch * model.context * model.d_model,
    )


def _kept(model: Transformer, plan: Plan, micro_batch: int, recompute: str) -> float:
    """Bytes of one block and one micro-batch. Nothing plays experts yet: they keep what fused kernels would."""
    sizes = {"micro_batch": micro_batch, "tp": plan.tp, "itemsize": int(ITEM), "recompute": recompute}
    if model.experts or model.latent:
        return block_bytes(model, **sizes)
    return kept.block_bytes(model, **sizes, composed=True)


def tied(model: Transformer, plan: Plan) -> float:
    """Bytes of the gradient of a weight that both ends have, where these lie on two rows."""
    stems, heads = ends(plan.schedule, plan.pp)
    return ITEM * model.vocab * model.d_model / plan.tp if model.tied and stems != heads else 0.0
