"""`Plan.check`: everything that keeps a plan from being played, found at once, each with its remedy.

Recipes are looked at, never imported: anything with the attributes of `RecipeLike` will do. Places are written as
dotted keys (`plan.tp, model.n_head`); whoever knows the files puts the lines to them.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from unisono.plan.batch import Batch, batch_of
from unisono.plan.combinations import (
    again,
    chunked,
    compiled,
    eight_bits,
    kept_whole,
    observing,
    put_away,
    ranges_alone,
    ranges_on,
    rounded,
    unflushed,
)  # fmt: skip
from unisono.plan.fields import USUAL, PlanFields
from unisono.plan.grammar import NAMED, named, problem_of
from unisono.plan.grid import Grid, columns_of
from unisono.programs.check import check as complete
from unisono.spec.errors import Problem, UsageError
from unisono.spec.fidelity import Fidelity


class RecipeLike(Protocol):
    """What is read of a recipe."""

    @property
    def model(self) -> Any: ...
    @property
    def train(self) -> Any: ...
    @property
    def launch(self) -> Any: ...
    def sections(self) -> Iterable[Any]: ...


class Devices(Protocol):
    """What is read of a cluster."""

    @property
    def devices(self) -> int: ...


def check(plan: PlanFields, recipe: RecipeLike | None, cluster: Devices | None) -> list[Problem]:
    """All problems, in reading order: what is not built, what means nothing, what does not fit."""
    problems = [
        *_not_built(plan),
        *_meaningless(plan),
        *unflushed(plan, recipe),
        *rounded(plan),
        *eight_bits(plan),
    ]
    problems += ranges_alone(plan)
    if recipe is not None:
        model, train = recipe.model, recipe.train
        problems += _mailed(plan, recipe)
        problems += [
            *ranges_on(plan, model), *put_away(plan, recipe), *again(plan, model), *_world(plan, recipe),
            *_precision(plan, recipe), *_encoded(plan, train), *_tensor(plan, model), *_context(plan, model),
            *_servers(plan, recipe), *_virtual(plan, model), *_experts(plan, model), *kept_whole(plan, model),
            *chunked(plan, model), *(model.refuses(plan) if hasattr(model, "refuses") else ()), *compiled(plan, train),
            *observing(train),
            *_stages(plan, model),
            *train.optimiser().problems(plan, model),
            *(problem for section in recipe.sections() for problem in section.problems(recipe, plan)),
        ]  # fmt: skip
        if plan.dp != -1:
            batch, wrong = batch_of(plan, train)
            problems += [wrong] if wrong else []
            problems += [*_served(plan, batch), *_rows(plan, batch)] if batch else []
            policy = named("sync", plan.sync)
            problems += policy.problems(plan, batch) if batch and policy else []
    if cluster is not None and plan.dp != -1 and plan.world > cluster.devices:
        what = f"the plan takes {plan.world} ranks, the cluster has {cluster.devices} devices"
        problems.append(
            Problem("P14", what, "plan", "lower dp, shard, pp, cp or tp, or name a larger cluster")
        )
    return problems


def _not_built(plan: PlanFields) -> Iterator[Problem]:
    for key in NAMED:
        if problem := problem_of(key, getattr(plan, key)):
            yield problem


def _meaningless(plan: PlanFields) -> Iterator[Problem]:
    if plan.dp != 1:
        return
    for key in ("codec", "sync"):
        text = getattr(plan, key)
        named_member = named(key, text)
        if (named_member is None and problem_of(key, text) is None) or getattr(named_member, "alone", False):
            continue
        what = f"{key}={text} with dp=1: replicas meet on dp and only there, and dp=1 has nobody to meet"
        yield Problem("P16", what, f"plan.{key}, plan.dp", f"dp=2 or {key}={getattr(USUAL, key)}")


def _encoded(plan: PlanFields, train: Any) -> Iterator[Problem]:
    """What the codec itself cannot be played with."""
    codec = named("codec", plan.codec)
    if codec is None or plan.dp == 1:
        return
    if codec.diverges:
        what = f"codec={plan.codec}: what it does not send is lost, and training may end nowhere"
        yield Problem("P23", what, "plan.codec", f"codec={plan.codec}+ef")
    yield from codec.problems(plan, train)
    if codec.fidelity is not Fidelity.LOSSY or (chosen := train.optimiser()).crossing is None:
        return
    where, subject = (
        "plan.codec, train.optimizer",
        f"codec={plan.codec} is given the first moment of {chosen.name}",
    )
    if train.clip:
        what = f"{subject}, and train.clip would scale another gradient"
        yield Problem("P23", what, f"{where}, train.clip", "--train.clip 0")
    if codec.rungs:
        what = f"{subject}, and chooses by what gradients cost"
        yield Problem("P23", what, where, "a codec by its name, or --train.optimizer adamw")


def _world(plan: PlanFields, recipe: RecipeLike) -> Iterator[Problem]:
    ranks = recipe.launch.ranks
    if plan.dp == -1:
        what = "dp=-1 fills the world, but the number of ranks is not known"
        yield Problem("P14", what, "plan.dp", "--launch.ranks N, or write dp=N")
    elif ranks is not None and ranks != plan.world:
        product = " x ".join(
            f"{k} {getattr(plan, k)}" for k in ("pp", "dp", "shard", "cp", "tp") if getattr(plan, k) > 1
        )
        what = f"the plan takes {plan.world} ranks ({product or 'dp 1'}), launch.ranks says {ranks}"
        fix = f"--launch.ranks {plan.world}, or leave launch.ranks out"
        if ranks % plan.inner == 0:
            fix = f"dp={ranks // plan.inner} (or dp=-1), or --launch.ranks {plan.world}"
        yield Problem("P14", what, "plan, launch.ranks", fix)


def _servers(plan: PlanFields, recipe: RecipeLike) -> Iterator[Problem]:
    servers, policy = getattr(recipe.launch, "servers", None), named("sync", plan.sync)
    if (
        servers is None or policy is None or plan.dp == 1
    ):  # one device is compared with, and has the same recipe
        return
    if not policy.served:
        what = f"launch.servers={servers}: sync={plan.sync} has no parameter servers"
        yield Problem("P16", what, "plan.sync, launch.servers", "sync=ssp:s=4, or leave launch.servers out")
    elif plan.dp != -1 and servers > plan.dp:
        what = f"launch.servers={servers}: a replica carries one server at most, and there are {plan.dp}"
        yield Problem("P16", what, "plan.dp, launch.servers", f"--launch.servers {plan.dp}, or more replicas")


def _mailed(plan: PlanFields, recipe: RecipeLike) -> Iterator[Problem]:
    launch, policy = recipe.launch, named("sync", plan.sync)
    if getattr(launch, "mailbox", None) is None:
        if (peer := getattr(launch, "peer", None)) is not None:
            what = f"launch.peer={peer}: without a mailbox this run has no peers"
            yield Problem(
                "P16", what, "launch.peer", "--launch.mailbox s3://bucket/run, or leave launch.peer out"
            )
        return
    if launch.peer is None:
        what = "launch.mailbox: peers know each other by name, and this run has none"
        yield Problem(
            "P16", what, "launch.mailbox, launch.peer", "--launch.peer NAME, another one for each peer"
        )
    if policy is not None and not policy.mails:
        what = f"launch.mailbox: sync={plan.sync} has nothing to exchange through a mailbox"
        yield Problem(
            "P16", what, "plan.sync, launch.mailbox", "sync=diloco:h=30, or leave launch.mailbox out"
        )
    elif policy is not None:
        yield from policy.mail_problems(plan)


def _precision(plan: PlanFields, recipe: RecipeLike) -> Iterator[Problem]:
    dtype = recipe.train.dtype
    if plan.precision == "fp64" and dtype != "float64":
        what = f"precision=fp64 computes in float64, but train.dtype keeps the weights in {dtype}"
        yield Problem("P15", what, "plan.precision, train.dtype", "--train.dtype float64, or precision=fp32")
    elif dtype == "float64" and plan.precision != "fp64":
        what = f"train.dtype float64 would lose its digits in precision={plan.precision}"
        yield Problem("P15", what, "plan.precision, train.dtype", "precision=fp64 or leave precision out")


def _tensor(plan: PlanFields, model: Any) -> Iterator[Problem]:
    if plan.tp == 1:
        return
    sizes = model.deals("tp")
    if sizes is None:
        what = f"tp={plan.tp}: the {model.kind} declares nothing that tensor parallelism could split"
        yield Problem(
            "P12", what, "plan.tp, model.kind", f"tp=1, and dp={plan.tp} or shard={plan.tp} instead"
        )
    if isinstance(plan.tp, Grid):
        yield from _grid(plan, plan.tp, model, sizes or ())
        return
    for name, keys, size in sizes or ():
        if size < plan.tp:
            what = f"tp={plan.tp} splits {name}, and there are {size}: some ranks would have none"
            yield Problem("P12", what, f"plan.tp, {keys}", f"tp={size} or less, or another {keys}")


def _context(plan: PlanFields, model: Any) -> Iterator[Problem]:
    if plan.cp == 1:
        return
    sizes, way = model.deals("cp"), named("cp_kind", plan.cp_kind)
    if sizes is None:
        what = f"cp={plan.cp}: a model of kind {model.kind} attends to no positions that could be split"
        yield Problem(
            "P12", what, "plan.cp, model.kind", f"cp=1, and dp={plan.cp} or shard={plan.cp} instead"
        )
    elif sizes and way is not None:
        yield from way.problems(plan.cp, columns_of(plan.tp), sizes)


def _grid(
    plan: PlanFields, grid: Grid, model: Any, sizes: Iterable[tuple[str, str, int]]
) -> Iterator[Problem]:
    """Columns deal heads and widths, rows deal samples; positions stay whole."""
    virtual = getattr(named("sync", plan.sync), "virtual", 1)
    if virtual > 1:
        what = f"sync={plan.sync} computes by {virtual} virtual shards in one row, tp={grid} has {grid.rows} rows"
        yield Problem("P12", what, "plan.tp, plan.sync", f"tp={int(grid)}, or sync=canonical")
    if not model.grids:
        what = f"tp={grid}: products of the {model.kind} are not split in two dims"
        yield Problem("P12", what, "plan.tp, model.kind", f"tp={int(grid)}")
    for name, keys, size in sizes:
        if size < grid.columns:
            what = f"tp={grid} splits {name} over {grid.columns} columns, and there are {size}"
            yield Problem("P12", what, f"plan.tp, {keys}", f"fewer columns, or another {keys}")


def _rows(plan: PlanFields, batch: Batch) -> Iterator[Problem]:
    """Rows of a grid deal out the samples of a micro-batch."""
    if isinstance(plan.tp, Grid) and batch.micro_batch < plan.tp.rows:
        what = f"tp={plan.tp} splits a micro-batch over {plan.tp.rows} rows, and it has {batch.micro_batch} samples"
        fix = f"--train.micro_batch {plan.tp.rows}, fewer micros, or tp={int(plan.tp)}"
        yield Problem("P11", what, "plan.tp, train.micro_batch, plan.micros", fix)


def _virtual(plan: PlanFields, model: Any) -> Iterator[Problem]:
    """What a policy that computes by virtual shards needs of the model: whole heads, equal stretches of positions."""
    count = getattr(named("sync", plan.sync), "virtual", 1)
    sizes = model.deals("cp") if model.deals("ep") is None else None
    if count > 1 and not sizes:
        what = (
            f"sync={plan.sync}: a model of kind {model.kind} does not say what of it virtual shards could be"
        )
        yield Problem("P12", what, "plan.sync, model.kind", "sync=canonical, without tp and cp")
    for name, keys, size in (sizes or ()) if count > 1 else ():
        if size % count:
            fits = " ".join(str(1 << k) for k in range(1, size.bit_length()) if not size % (1 << k))
            fix = f"sync=canonical:shards= one of {fits}" if fits else f"an even {keys}"
            what = f"sync={plan.sync}: {count} virtual shards do not divide {name} {size}"
            yield Problem("P12", what, f"plan.sync, {keys}", fix)


def _experts(plan: PlanFields, model: Any) -> Iterator[Problem]:
    """ep deals out experts, or a recommender's tables, over the ranks of shard, cp and tp, the innermost first."""
    if plan.ep == 1:
        return
    sizes = model.deals("ep")
    if sizes is None:
        what = f"ep={plan.ep}: a model of kind {model.kind} has no experts to split"
        yield Problem("P12", what, "plan.ep, model.kind", "leave ep out")
        return
    ranks = plan.shard * plan.cp * plan.tp
    if ranks % plan.ep or (plan.ep % plan.tp and plan.tp % plan.ep):
        what = f"ep={plan.ep} re-uses the ranks of shard x cp x tp = {ranks}, tp={plan.tp} first, and does not fit them"
        fits = " ".join(str(n) for n in divisors(ranks) if not (n % plan.tp and plan.tp % n))
        yield Problem("P12", what, "plan.ep, plan.shard, plan.cp, plan.tp", f"ep one of {fits}")
    for name, keys, size in sizes:
        if size % plan.ep:
            fits = " ".join(str(n) for n in divisors(size))
            what = f"ep={plan.ep} does not divide {name} {size}"
            yield Problem("P12", what, f"plan.ep, {keys}", f"ep one of {fits}")


def _stages(plan: PlanFields, model: Any) -> Iterator[Problem]:
    depth = model.depth
    schedule = named("schedule", plan.schedule)
    if plan.pp > 1 and schedule is not None and schedule.alone:
        what = f"schedule={plan.schedule} is the timetable of one stage, pp={plan.pp} has {plan.pp}"
        yield Problem("P13", what, "plan.schedule, plan.pp", "schedule=1f1b or schedule=gpipe")
    stages = plan.pp if schedule is None else len(schedule.placement(plan.pp)) // schedule.chains
    said = schedule.blocks if schedule is not None and plan.pp > 1 else ()
    if said and (len(said) != stages or depth not in (None, sum(said))):
        what = (
            f"schedule={plan.schedule} cuts {sum(said)} blocks into {len(said)} stages; the model has {depth}"
        )
        fix = f"as many numbers as there are stages, {stages}, whose sum is {depth}"
        yield Problem("P13", what, "plan.schedule, plan.pp", fix)
    if said and schedule is not None and 0 in said:
        rows = [0] * plan.pp
        for stage, row in enumerate(schedule.placement(plan.pp)):
            rows[row] += said[stage % len(said)]
        if 0 in rows:
            what = f"schedule={plan.schedule} leaves rank {rows.index(0)} of the pipeline without a block"
            fix = "a block on each rank: 0 where it has another stage with one"
            yield Problem("P13", what, "plan.schedule", fix)
    elif depth is not None and stages > max(1, depth):
        each = f", {stages // plan.pp} on each of {plan.pp} ranks," if stages > plan.pp else ""
        what = f"{stages} pipeline stages{each} need at least {stages} blocks, the model has {depth}"
        fix = "fewer stages a rank, schedule=1f1b" if each else f"pp={max(1, depth)} or less"
        yield Problem("P13", what, f"plan.pp, {model.depth_key}", f"{fix}, or a deeper model")


def _served(plan: PlanFields, batch: Batch) -> Iterator[Problem]:
    """Some timetables exist for some numbers of micro-batches alone."""
    schedule = named("schedule", plan.schedule)
    where = "plan.schedule, plan.pp, plan.micros"
    if schedule is not None and not schedule.alone and not schedule.serves(plan.pp, batch.micros):
        try:
            schedule.timetable(plan.pp, batch.micros)
        except UsageError as error:
            yield Problem("P13", error.what, where, error.fix)
    elif schedule is not None and ".py:" in plan.schedule:  # ours are checked by tests, a user's here
        for wrong in complete(schedule.timetable(plan.pp, batch.micros))[:3]:
            yield Problem(
                "P13", f"{plan.schedule}: {wrong}", where, "each F and B once, in an order that ends"
            )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
