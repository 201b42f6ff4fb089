"""What a plan is said to send is what ranks send: every collective and message of a step, by axis and operation."""

from collections import Counter, defaultdict
from functools import cache

import pytest
import torch

from unisono.comm import threads
from unisono.config import DataConfig, ModelConfig, Recipe, Resolved, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.plan.grid import columns_of
from unisono.planner import kinds
from unisono.planner.alike import is_uniform
from unisono.planner.clusters import cluster
from unisono.planner.priced import closed
from unisono.planner.question import Question
from unisono.planner.stack import stack
from unisono.planner.timetables import of
from unisono.planner.work.calls import calls, leafwise, sent
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer, transformer
from unisono.spec.model import Facts
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.dataset import Corpus, Images, TokenWindows
from unisono.train.step.train_step import train_step
from unisono.verify.cover import covering

# Sizes that every number of ranks in the covering set divides, so that nothing is filled up.
_GPT = {"n_layer": 4, "n_head": 24, "d_model": 96, "context": 24, "vocab": 48, "d_ff": 192}
_LLAMA = {
    "positions": "rotary",
    "norm": "rms",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
KINDS = {
    "llama": ModelConfig(kind="gpt", **_GPT, **_LLAMA, n_kv_head=6),
    "tied": ModelConfig(kind="gpt", **_GPT, dropout=0.1),
    "untied": ModelConfig(kind="gpt", **_GPT, tie_embeddings=False, bias=False),
    "experts": ModelConfig(kind="moe", **{**_GPT, "n_layer": 2}, n_experts=12, d_expert=24, bias=False),
    "shared": ModelConfig(
        kind="moe", **{**_GPT, "n_layer": 2}, n_experts=12, d_expert=24, n_shared_experts=1, dropout=0.1
    ),
    "convnet": ModelConfig(kind="convnet", n_layer=4, channels=24, bias=False),
    "mlp": ModelConfig(kind="mlp", hidden=(24, 48, 96, 48)),
}
# Routers that ask about the other positions of a leaf.
ASKING = {
    "balanced": ModelConfig(
        kind="moe", **{**_GPT, "n_layer": 2}, n_experts=12, d_expert=24, aux_loss=0.01, capacity_factor=1.5
    ),
    "choosing": ModelConfig(
        kind="moe", **{**_GPT, "n_layer": 2}, n_experts=12, d_expert=24, router="expert_choice", z_loss=0.001
    ),
}
EVERY = KINDS | ASKING
FACTS = Facts(classes=24, sample_shape=(3, 4, 4))


def recipe(kind: str, samples: int = 1, batch: int = 24) -> Recipe:
    data = DataConfig() if EVERY[kind].attends else DataConfig(source="digits")  # not read
    train = TrainConfig(global_batch=batch, micro_batch=samples, steps=1)
    return Recipe(model=EVERY[kind], data=data, train=train)


def samples_of(plan: Plan) -> int:
    """Of a micro-batch: one, but rows of a grid have one each."""
    return plan.tp // columns_of(plan.tp)


@cache
def corpus(kind: str) -> Corpus:
    draws = torch.Generator().manual_seed(0)
    if EVERY[kind].attends:
        tokens = torch.randint(48, (30 * 24 + 1,), generator=draws).numpy()
        some, facts = TokenWindows(tokens, 24), Facts(vocab=48)
    else:
        some = Images(torch.rand(30, 3, 4, 4, generator=draws), torch.randint(24, (30,), generator=draws))
        facts = FACTS
    return Corpus(
        some, some, facts.vocab, facts.classes or 0, facts.sample_shape or (24,), None, None, "", "here"
    )


def model(kind: str) -> Transformer | Network:
    if EVERY[kind].attends:
        return transformer(EVERY[kind], 48)
    return Network(EVERY[kind].workload(FACTS), by_weights=True)


class Counted(Recorder):
    """Notes how often, too."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.times: Counter[tuple[str, str]] = Counter()

    def count(self, axis: str, op: str, nbytes: int, algorithm: str = "") -> None:
        super().count(axis, op, nbytes, algorithm)
        self.times[axis, op] += nbytes > 0


Sent = dict[tuple[str, str], tuple[float, float]]


def played(kind: str, plan: Plan) -> Resolved:
    """A step of twelve samples where they can be dealt: what is sent goes by the micro-batches of a rank, of which two
    show as much as four."""
    batch = 12 if 12 % (plan.replicas * samples_of(plan)) == 0 else 24
    return resolve(recipe(kind, samples_of(plan), batch), str(plan), plan.world)


def recorded(kind: str, plan: Plan) -> list[Sent]:
    """Of each row of the pipeline, what its first rank sends in a step."""
    resolved = played(kind, plan)

    def live(rank: int) -> tuple[int, Sent]:
        place, recorder = place_of(rank, plan.world, rank, "gloo", 60.0), Counted(rank)
        run = build(resolved.recipe, resolved.plan, place, corpus(kind), recorder)
        feed, _ = feeds(resolved.recipe, resolved.plan, corpus(kind), place.device)
        recorder.times.clear()
        before = recorder.bytes()
        train_step(run, feed.fetch(0, run.leaves))
        after = recorder.bytes()
        told: Sent = {key: (after[key] - before.get(key, 0), n) for key, n in recorder.times.items()}
        return run.mesh.at["pp"], told

    rows: dict[int, Sent] = {}
    for row, told in threads.run(plan.world, live, timeout=300.0):
        rows.setdefault(row, told)
    return [rows[row] for row in range(plan.pp)]


def said(kind: str, plan: Plan) -> list[Sent]:
    resolved = played(kind, plan).plan
    return [
        sent(model(kind), resolved, samples_of(plan), resolved.micros or 1, row) for row in range(plan.pp)
    ]


def built(kind: str) -> list[Plan]:
    """Of networks those that play all blocks alike: others have no price."""
    plans = covering(recipe(kind), least=100 if kind == "llama" else 0)
    return [plan for plan in plans if KINDS[kind].attends or is_uniform(plan)]


@cache
def covered(kind: str) -> list[Plan]:
    """Every pair of values, on up to four ranks."""
    return covering(recipe(kind), ranks=4, least=0)


def held(kind: str, plan: Plan) -> None:
    got, want = recorded(kind, plan), said(kind, plan)
    for row, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        times = {key: n for key, (_, n) in mine.items()}
        assert {key: n for key, (_, n) in theirs.items()} == pytest.approx(times), f"{plan}: row {row}"
        for key, (nbytes, n) in mine.items():
            # A bucket is filled up to a multiple of the replicas; a part of what three ranks deal is no whole byte.
            slack = 8 * plan.dp * n if key[0] == "dp" else n * (3 in (plan.shard, plan.cp))
            # Vectors and rows that fill no block: much in models as small as these.
            rounded = 0.1 if key[0] == "shard" and (plan.wires.gather or plan.wires.scatter) else 1e-6
            rounded = 0.3 if key[0] == "ep" else rounded  # as many tokens as routers send
            assert theirs[key][0] == pytest.approx(nbytes, rel=rounded, abs=slack), (
                f"{plan}: row {row}: {key}"
            )


FEW = {
    "llama": ["cp=3", "cp=2 tp=2 cp_kind=gather recompute=full", "cp=2 shard=2 cp_kind=ulysses zero=1", "dp=2 tp=2", "shard=2 zero=1 dp=2", "shard=2 pp=2 recompute=full", "dp=2 pp=2 schedule=dualpipe", "shard=2 tp=2", "shard=2 zero=3:wire=int8,prefetch=2", "tp=2:chunks=2 pp=2", "tp=2:chunks=2 recompute=full dp=2", "shard=2 zero=3 blocks=0:zero=1", "tp=2 blocks=1:tp=1,recompute=full", "cp=2 tp=2 blocks=0:tp=1", "shard=2 zero=2 pp=2 blocks=0:zero=3;1:recompute=full", "shard=2 tp=2 zero=1 blocks=0:tp=1", "tp=2x2", "dp=2 tp=2x3 recompute=full", "tp=2x2 pp=2 shard=2", "tp=2x2 cp=2", "dp=3 tp=2 sync=canonical:shards=2 recompute=full"],
    "tied": ["cp=2 dp=2 pp=2", "cp=2 cp_kind=ulysses recompute=selective", "cp=2 dp=3 sync=canonical", "dp=3 sync=canonical", "tp=2 pp=2 recompute=full", "dp=2 collective=messages", "shard=2 pp=2 schedule=zbv", "dp=3 shard=2 sync=canonical zero=1", "dp=2 shard=2 zero=2:scatter=int8 precision=bf16:params", "tp=2x2 recompute=full", "dp=3 tp=2x2 sync=canonical", "dp=3 cp=2 sync=canonical:shards=2 recompute=selective", "dp=3 tp=2 pp=2 sync=canonical:shards=4 precision=bf16"],
    "untied": ["dp=3 pp=2 sync=canonical", "dp=3 cp=2 shard=2 sync=canonical:shards=4", "tp=3x2 precision=bf16", "tp=2x2 recompute=full precision=bf16"],
    "experts": ["shard=2 ep=2", "tp=2", "tp=4 ep=2 dp=2", "cp=2 tp=2 ep=2", "shard=4 ep=2 pp=2"],
    "shared": ["tp=2 ep=2 pp=2", "cp=2 shard=2 ep=2", "shard=4 ep=2 dp=2 recompute=full"],
    "balanced": ["tp=2 ep=2", "cp=2 tp=2 recompute=full", "cp=3 shard=2", "tp=3"],
    "choosing": ["cp=2 tp=2 ep=2", "cp=2 recompute=full"],
    "convnet": ["shard=2 pp=3 schedule=gpipe recompute=full", "dp=2 pp=2 schedule=interleaved:v=2", "tp=2", "tp=3", "dp=2 tp=2 recompute=full", "pp=2 tp=2 precision=bf16", "shard=2 tp=2"],
    "mlp": ["dp=2 shard=2 collective=memory", "shard=2 pp=2 precision=bf16:params", "tp=2", "tp=3 precision=bf16", "dp=2 tp=2", "pp=2 tp=2 recompute=full", "shard=2 tp=2"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in FEW.items() for text in texts])
def test_what_is_priced_is_what_is_sent(kind: str, text: str) -> None:
    held(kind, Plan.parse(text))


@pytest.mark.parametrize(
    "kind", [kind for kind, model in KINDS.items() if not (model.attends and model.deals("ep"))]
)
def test_devices_are_priced_for_what_is_sent(kind: str) -> None:
    """Bytes by axis: of the fullest row what meets once a step, else of the mean one. Experts on devices are priced as
    other programs send their tokens."""
    plans = covered(kind)
    single = [one for one in plans if len(of(one.schedule).placement(2)) == 2]  # one stage a rank
    for plan in single:
        if without_price(kind, plan):
            continue
        own, many = resolve(recipe(kind), str(plan), plan.world).plan, plan.pp
        ask = Question(model(kind), own, cluster("dgx-a100:1"), stack("plain"), 1, own.micros or 1)
        rows = [defaultdict[str, float](float) for _ in range(many)]
        for row, found in enumerate(rows):
            for call in calls(model(kind), own, 1, own.micros or 1, row):
                # Numbers of a step have no price; ranks of cp and tp together are priced on tp.
                told = 1000 if own.codec == "plain" else 64  # bytes; what a codec sends whole may be little
                if call.axis != "dp" or not call.later or call.nbytes >= told:
                    axis = "tp" if call.axis == "cp+tp" else call.axis
                    found[axis] += call.sent(call.ranks(own)) * call.times
        for axis, traffic in closed(ask).comm.items():
            if (axis, kind) == ("tp", "convnet") and plan.precision != "fp32":
                continue  # autocast computes norms in fp32 on a device, in the narrow type on a CPU
            fullest = axis == "dp" or (axis == "shard" and plan.zero < 3)
            most, mean = max(r[axis] for r in rows), sum(r[axis] for r in rows) / many
            # On tp stem and head have no price; a leaf's second use of a tied weight is one more gradient.
            near = 0.15 if axis == "tp" else 0.02
            if axis == "shard" and many > 1 and not is_uniform(plan):
                # Some of a row's blocks meet once a step and some in each pass, which calls do not tell apart: the mean
                # of these, and what the fullest row has of those.
                assert mean * (1 - near) <= traffic.bytes <= (mean + most) * (1 + near), f"{plan}: {axis}"
                continue
            want = most if fullest else mean
            assert traffic.bytes == pytest.approx(want, rel=near), f"{plan}: {axis}"


def without_price(kind: str, plan: Plan) -> bool:
    """Whether a plan has no price on dgx-a100 by design, where it is refused: it puts something away, and nobody has
    said how fast its copies are; the device multiplies no numbers of eight bits; blocks of networks are no ranges."""
    away = plan.offload != "none" or "offload=" in plan.blocks
    return away or plan.arithmetic.fp8 or not (KINDS[kind].attends or is_uniform(plan))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hosts_price_is_made_of_is_what_is_sent(kind: str) -> None:
    """Collectives inside passes, of all micro-batches; of every policy whose gradients need no tree."""
    plans = [p for p in covered(kind) if not leafwise(p) and p.precision == "fp32"]
    for plan in plans:
        own = resolve(recipe(kind), str(plan), plan.world).plan
        micros, table = own.micros or 1, of(plan.schedule).timetable(plan.pp, own.micros or 1)
        works = kinds.kind(model(kind)).stages(model(kind), own, 1, micros)
        for row in range(plan.pp):
            made, said_ = (
                defaultdict[tuple[str, str], float](float),
                defaultdict[tuple[str, str], float](float),
            )
            for stage in table.owned(row):
                many = len(table.micros_of(stage))
                for call in (*works[stage].calls[0], *works[stage].calls[1]):
                    if call.axis in ("tp", "cp", "cp+tp", "shard"):
                        made[call.axis, call.op] += call.nbytes * call.times * many
                        made[call.axis, f"{call.op}, times"] += call.times * many
            for call in calls(model(kind), own, 1, micros, row):
                if call.axis in ("tp", "cp", "cp+tp", "shard"):
                    said_[call.axis, call.op] += call.nbytes * call.times
                    said_[call.axis, f"{call.op}, times"] += call.times
            if (
                len(table.owned(row)) > 1
            ):  # what all ranks of tp have is summed at once, and priced stage by stage
                made.pop(("tp", "all_reduce, times"), None), said_.pop(("tp", "all_reduce, times"), None)
                (
                    made.pop(("cp", "all_reduce"), None),
                    said_.pop(("cp", "all_reduce"), None),
                )  # so are tied weights
            for axis in ("cp", "cp+tp"):  # buckets of one sum are priced as one
                made.pop((axis, "all_reduce, times"), None), said_.pop((axis, "all_reduce, times"), None)
            assert made == pytest.approx(said_), f"{plan}: row {row}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_built_plan_sends_what_is_priced(kind: str) -> None:
    plans = built(kind)
    for plan in plans:
        held(kind, plan)
    print(f"{kind}: {len(plans)} plans send what is priced")
