"""How many blocks each row of the pipeline has, as `parallel.cut` cuts at run time or as Megatron does: evenly."""

from collections.abc import Sequence
from functools import cache, lru_cache

from unisono.planner.timetables import chunks, name_of, of
from unisono.planner.work.transformer import Transformer
from unisono.programs.schedules import SCHEDULES


@cache
def balanced(blocks: int, stages: int, last: float) -> tuple[int, ...]:
    """Equal blocks per stage so that the dearest stage is as cheap as can be; `last` is the head, in blocks.

    What `parallel.cut.balance` finds where the stem is free: of the best cuts, the one whose last stages are shortest.
    Raises ValueError if there are fewer blocks than stages.
    """
    if stages > blocks:
        raise ValueError(f"{blocks} blocks cannot make {stages} stages")
    counts: list[int] = []
    left, extra = blocks, last
    for before in range(stages - 1, 0, -1):

        def dearest(kept: int, before: int = before, left: int = left, extra: float = extra) -> float:
            return max(-(-kept // before), left - kept + extra)

        kept = min(range(before, left), key=lambda kept: (dearest(kept), -kept))
        counts.append(left - kept)
        left, extra = kept, 0.0
    counts.append(left)
    return tuple(reversed(counts))


def even(blocks: int, ranks: int) -> tuple[int, ...]:
    """Return block counts that differ by one at most. Outer rows, which also have stem and head, are not the larger
    ones."""
    base, extra = divmod(blocks, ranks)
    return tuple(
        base + (1 if 1 <= row <= extra or (row == 0 and extra == ranks) else 0) for row in range(ranks)
    )


def head_share(model: Transformer) -> float:
    """The head's products in those of a block: what `parallel.cut.matrix_cost` compares."""
    products = model.d_model * (2 * model.d_model + 2 * model.kv_width)
    products += (3 if model.gated else 2) * model.d_model * model.d_ff
    return model.vocab * model.d_model / products


@cache
def cut_of(schedule: str) -> tuple[int, ...]:
    """Blocks by stage that a plan says, `cut=13/12/12/11` among the schedule's options; () where it says none."""
    return SCHEDULES.read(schedule).blocks


def with_cut(schedule: str, blocks: Sequence[int]) -> str:
    """The schedule with these blocks by stage."""
    return f"{name_of(schedule)}:cut={'/'.join(str(count) for count in blocks)}"


def is_cuttable(schedule: str) -> bool:
    """Whether it has one stage a rank, which may be cut anywhere."""
    return chunks(schedule) == 1 and of(schedule).chains == 1 and not of(schedule).alone


@cache
def shares(schedule: str, ranks: int) -> tuple[float, ...]:
    """Return, for each stage of the timetable, its share of its row's blocks: as the plan cuts, else equal."""
    placement, cut, chains = of(schedule).placement(ranks), cut_of(schedule), of(schedule).chains
    if len(cut) * chains != len(placement):
        return (1.0 / chunks(schedule),) * len(placement)
    blocks = [cut[stage % len(cut)] for stage in range(len(placement))]
    rows = [0.0] * ranks
    for row, count in zip(placement, blocks, strict=True):
        rows[row] += count / chains
    return tuple(count / rows[row] for row, count in zip(placement, blocks, strict=True))


def stages_of(model: Transformer, schedule: str, ranks: int) -> tuple[int, ...]:
    """Blocks of each stage of the model, as the program cuts it."""
    length = len(of(schedule).placement(ranks)) // of(schedule).chains
    cut = cut_of(schedule)
    if len(cut) == length and sum(cut) == model.n_layer:
        return cut
    if length > model.n_layer:
        return even(model.n_layer, length)
    return balanced(model.n_layer, length, head_share(model))


@lru_cache(maxsize=4096)
def rows_of(model: Transformer, schedule: str, ranks: int, is_balanced: bool) -> tuple[float, ...]:
    """Blocks of each row of the pipeline, for one micro-batch; of DualPipe's two stages the mean.

    Rows with several stages have the sum of theirs, where the timetable places them. A cut that the schedule says
    (`1f1b:cut=13/12/12/11`) is taken as it is.
    """
    v, cut = chunks(schedule), cut_of(schedule)
    is_told = len(cut) == ranks * v and sum(cut) == model.n_layer
    if not is_told and (not is_balanced or ranks == 1 or ranks * v > model.n_layer):
        return even(model.n_layer, ranks)
    stages, layers_by_row = stages_of(model, schedule, ranks), [0] * ranks
    for stage, row in enumerate(of(schedule).placement(ranks)):
        layers_by_row[row] += stages[stage % len(stages)]
    chains = of(schedule).chains
    return tuple(layers / chains for layers in layers_by_row) if chains > 1 else tuple(layers_by_row)
