"""A covering set of plans: every pair of values of any two keys stands together in some plan. No torch.

Most mistakes in configurable software need no more than two settings at once (Kuhn, Wallace & Gallo, "Software fault
interactions and implications for software testing", 2004); so all pairs, and for a wide walk all triples, are taken
greedily from all plans that the recipe allows (after Cohen et al., "The AETG system", 1997). Values come from the
grammar's list of what is built, so the set grows by itself.
"""

import math
import zlib
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

from unisono.config import Recipe
from unisono.plan import Plan
from unisono.plan.grammar import NAMED, known, member
from unisono.plan.grid import Grid
from unisono.plan.options import SAMPLES
from unisono.sync import POLICIES
from unisono.verify.bounds import COMPUTE

SIZES = (1, 2, 3, 4, 8)
AXES = ("dp", "shard", "pp", "tp", "cp")
MIXED = 40  # rows with more than two unusual values that a mesh has, about
SHARDED = "canonical:shards=4"  # beside canonical without
CHUNKED = "chunks=2"  # of tp, beside products that gather all and then multiply
GRIDS = (Grid(2, 2),)  # of tp, beside plain numbers
RANGES = (
    "0:recompute=full;1:recompute=selective", "0:offload=params:to=disk;1:offload=activations:to=disk",
    "0:zero=1;1:zero=2", "1:zero=3,recompute=full", "1:tp=1",
)  # fmt: skip
MESH = (*AXES, "ep")  # which takes no ranks of its own
# Micro-batches of a step, the first that fits: few different ones, few references.
LEAVES = (8, 12, 4, 6, 2, 3, 1)
OPTIONS: Mapping[str, str] = {
    "interleaved": "v=2", "local_sgd": "h=2", "diloco": "h=2", "quorum": "k=1", "ssp": "s=1", "powersgd": "r=2",
    "topk": "ratio=0.1", "randomk": "ratio=0.1", "cast": "bf16", "optimizer": "to=disk",
    "params": "to=disk", "activations": "to=disk",
}  # fmt: skip


def covering(recipe: Recipe, ranks: int = 8, least: int = 100, wide: bool = False) -> list[Plan]:
    """Plans on up to `ranks` ranks in which every two values of different keys that any allowed plan has together
    stand together; then more of them, each with as many new triples as can be had, until there are `least` (or no
    others). wide: every triple, however many plans that takes. In order of their ranks."""
    plans = candidates(recipe, ranks)
    chosen: list[Plan] = []
    pairs = _rows(plans, 2)
    _take(pairs, chosen, None)
    chosen = _needed(chosen, pairs)
    if wide or len(chosen) < least:
        taken = set(chosen)
        triples = _rows(plans, 3)
        have = set().union(*(triples[plan] for plan in chosen))
        rest = {plan: row - have for plan, row in triples.items() if plan not in taken}
        _take(rest, chosen, None if wide else least)
    return sorted(chosen, key=lambda plan: (plan.world, str(plan)))


def _take(
    rows: dict[Plan, set[tuple[tuple[str, object], ...]]], chosen: list[Plan], most: int | None
) -> None:
    """Add plans of rows to chosen, the worthiest first, until all is covered or there are `most`."""
    bits = {values: 1 << place for place, values in enumerate(set().union(*rows.values()))}
    missing = (1 << len(bits)) - 1
    plans = {str(plan): (plan, sum(map(bits.__getitem__, row)), plan.world**2) for plan, row in rows.items()}
    # What a plan is worth is what it adds over what it costs: ranks share the cores, and each connects to each. Ties go
    # by the text, so that the set is the same everywhere. Worths only fall, so one that is still the largest is.
    worths = sorted((row.bit_count() / cost, text) for text, (_, row, cost) in plans.items())
    while worths and (missing if most is None else len(chosen) < most):
        _, text = worths.pop()
        best, row, cost = plans[text]
        now = (row & missing).bit_count() / cost, text
        if worths and now < worths[-1]:
            insort(worths, now)
        else:
            chosen.append(best)
            missing &= ~row


def _needed(chosen: Sequence[Plan], rows: Mapping[Plan, set[tuple[tuple[str, object], ...]]]) -> list[Plan]:
    """Return the plans without those whose values stand together in others too; the ones with most ranks go first."""
    uses = Counter(values for plan in chosen for values in rows[plan])
    left = []
    for plan in sorted(chosen, key=lambda plan: (-plan.world, str(plan))):
        if min(map(uses.__getitem__, rows[plan]), default=2) > 1:
            uses.subtract(rows[plan])
        else:
            left.append(plan)
    return left


def candidates(recipe: Recipe, ranks: int = 8) -> list[Plan]:
    """Every plan that differs from the others in something it uses and that the recipe allows."""
    plans: dict[str, Plan] = {}
    dealt = SIZES if recipe.model.deals("ep") is not None else (1,)
    for *sizes, ep in product(*((*SIZES, *GRIDS) if axis == "tp" else SIZES for axis in AXES), dealt):
        if math.prod(sizes) > ranks or ep > math.prod(sizes):
            continue
        mesh: dict[str, int] = dict(zip(MESH, (*sizes, ep), strict=True))
        micros = _micros(recipe, mesh["dp"] * mesh["shard"])
        for named in _named(recipe, mesh):
            plan = Plan(**{**mesh, **named}, micros=micros, said=frozenset(named))  # type: ignore[arg-type]
            if not plan.check(recipe):
                plans[str(plan)] = plan
    return [plan for plan in plans.values() if plan.world > 1 or _features(plan).keys() - {"precision"}]


def _named(recipe: Recipe, mesh: Mapping[str, int]) -> Iterator[dict[str, object]]:
    """Values of the keys with names, where they mean anything on this mesh: every two that are not the usual ones
    together, and some of the rows with more, always the same ones, for there are thousands."""
    choices: dict[str, Sequence[object]] = {
        "zero": (1, 2, 3, *SAMPLES["zero"]) if mesh["shard"] > 1 else (3,)
    }
    if mesh["tp"] > 1 and not isinstance(mesh["tp"], Grid):
        choices["tp"] = (mesh["tp"], f"{mesh['tp']}:{CHUNKED}")
    for key in NAMED:
        # Replicas that have weights of their own are proven by identities by `unisono verify --conformance`.
        names = [name for name in known(key) if key != "sync" or POLICIES.find(name).equal]
        values = tuple(f"{name}:{OPTIONS[name]}" if name in OPTIONS else name for name in names)
        if key == "collective":
            # Mpirun would have to start them.
            values = tuple(name for name in values if member(key, name).threaded)
        values += (SHARDED,) if key == "sync" else ()
        if key == "precision":
            values = _precisions(recipe, mesh, values)
        idle = {"schedule": mesh["pp"] == 1, "cp_kind": mesh["cp"] == 1, "codec": mesh["dp"] == 1,
                "collective": mesh["dp"] == 1}  # fmt: skip
        if values and not idle.get(key):
            choices[key] = values
    usual = _usual() | {"tp": mesh["tp"]}
    ranges = RANGES if recipe.model.depth is not None else ()
    every = math.ceil(math.prod(map(len, choices.values())) / MIXED)
    for row, place, off, free in _every_row(choices, usual):
        if off <= 2 or not place % every:
            yield dict(zip(choices, row, strict=True))
        if not free:
            yield from (dict(zip(choices, row, strict=True)) | {"blocks": said} for said in ranges)


def _every_row(
    choices: Mapping[str, Sequence[object]], usual: Mapping[str, object]
) -> Iterator[tuple[tuple[object, ...], int, int, int]]:
    """(a row, a number drawn by its text, how many values are not the usual ones, how many of them had a choice), in
    the order of `product`. Key by key, since rows begin alike and there are hundreds of thousands."""
    begun: list[tuple[tuple[object, ...], int, int, int]] = [((), zlib.crc32(b"("), 0, 0)]
    *_, last = choices
    for key, values in choices.items():
        end = ")" if key == last else ", "
        parts = [
            (value, f"{value!r}{end}".encode(), odd := value != usual[key], odd and len(values) > 1)
            for value in values
        ]
        begun = [
            ((*row, value), zlib.crc32(text, place), off + odd, free + chosen)
            for row, place, off, free in begun
            for value, text, odd, chosen in parts
        ]
    yield from begun


def _usual() -> dict[str, object]:
    plan = Plan()
    return {key: getattr(plan, key) for key in ("zero", *NAMED)}


def _micros(recipe: Recipe, replicas: int) -> int | None:
    """Return the micro-batches of each replica, a power of two, so that most plans accumulate and canonical sums can be
    played; None where the recipe says how large a micro-batch is, or no number fits."""
    if recipe.train.micro_batch is not None:
        return None
    fit = [n // replicas for n in LEAVES if recipe.train.global_batch % n == 0 and n % replicas == 0]
    return next((micros for micros in fit if micros & (micros - 1) == 0), None)


def _precisions(recipe: Recipe, mesh: Mapping[str, int], built: Sequence[str]) -> tuple[str, ...]:
    """In bf16 a plan that cuts layers is `UNPROVEN`: its bound has room for a micro-batch."""
    if recipe.train.dtype == "float64":
        return ("fp64",)
    whole = mesh["tp"] * mesh["cp"] * mesh["ep"] == 1
    half = (*(name for name in built if name in COMPUTE), *SAMPLES["precision"])
    return ("fp32", *half) if whole else ("fp32",)


def _features(plan: Plan) -> dict[str, object]:
    default = Plan()
    keys = (*MESH, "zero", *NAMED, "blocks")
    return {key: plan.text(key) for key in keys if plan.text(key) != getattr(default, key)}


def _rows(plans: Sequence[Plan], strength: int) -> dict[Plan, set[tuple[tuple[str, object], ...]]]:
    rows, dealt = {}, any(plan.ep > 1 for plan in plans)
    for plan in plans:
        values = [(axis, getattr(plan, axis)) for axis in AXES]
        values += [("ep", plan.ep)] if dealt else []
        values += [("zero", plan.text("zero"))] if plan.shard > 1 else []
        values += [("chunks", plan.chunks)] if plan.tp > 1 else []
        values += [(key, plan.text(key)) for key in (*NAMED, "blocks") if _means(plan, key)]
        rows[plan] = set(combinations(sorted(values, key=str), strength))
    return rows


def _means(plan: Plan, key: str) -> bool:
    need = {"schedule": plan.pp, "cp_kind": plan.cp, "codec": plan.dp, "collective": plan.dp}.get(key, 2)
    return need > 1
