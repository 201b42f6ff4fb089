"""The price on a host of shared cores: laws that every price keeps, files that come back, fits that find what made them."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.parts import together
from unisono.measure import fit as host_fit
from unisono.measure.calibrate import sizes
from unisono.measure.file import FittedHost, as_toml
from unisono.models.convnet import convnet
from unisono.models.mlp import mlp
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.host import price_on_host
from unisono.planner.host_memory import memory_on_host
from unisono.planner.kinds import Model, attending
from unisono.planner.machines.cluster import Cluster, Device, Link
from unisono.planner.machines.host import Curve, Host, Pace
from unisono.planner.priced import verdict
from unisono.planner.simulate import Question, simulate
from unisono.planner.stack import stack
from unisono.planner.work.experts import Experts
from unisono.planner.work.networks import Network
from unisono.spec.errors import UsageError
from unisono_contrib.planner.studies.sensitivity import sensitivities
from unisono_contrib.planner.timeline import timeline

FORWARD = Pace(1e-11, 1.4e-11, 1.6e-10, 8e-11, 1.1e-10, 1e-8, 2e-5)
BACKWARD = Pace(1.05e-11, 1.7e-11, 1.9e-10, 1.4e-10, 9e-11, 0.0, 1e-5)
LINE = Curve((4096.0, 2.0**20, 2.0**24), (5e-4, 1e-3, 1.5e-2))
HOST = Host(
    2, FORWARD, BACKWARD, (1e-4, 3e-5, 9e-10), 5e-4, 1.05,
    {f"{op}:{n}": LINE for op in ("all_reduce", "all_gather", "reduce_scatter", "message") for n in (2, 4)},
    {"tp": 3e-4, "shard": 1e-3, "pp": 1e-3, "pp crowded": 3e-3},
    {"dp": (2.9e8, 0.05, 0.0), "shard": (2.9e8, 0.0, 4.0), "tp": (3e8, 0.2, 0.0), "pp": (2.9e8, 0.3, 0.0)},
)  # fmt: skip
MODEL = host_fit.model_of(sizes(4, 4, 128, 64))
PLANS = ("dp=2", "shard=2 zero=1", "shard=2 zero=3", "tp=2", "pp=2 micros=4", "dp=2 pp=2 micros=4", "tp=4",
         "shard=2 tp=2", "dp=2 tp=2", "pp=4 micros=4", "dp=2 recompute=full")  # fmt: skip
MODELS = {
    "gpt": MODEL,
    "moe": replace(MODEL, experts=Experts(4, 2, 256, every=2)),
    "convnet": Network(convnet(image=(3, 16, 16), channels=16, n_layer=4, classes=10), by_weights=True),
    "mlp": Network(mlp(features=192, hidden=(128,) * 4, classes=10), by_weights=True),
}
# tp deals transformers alone
EVERY = [(name, plan) for name in MODELS for plan in PLANS if "tp=" not in plan or name in ("gpt", "moe")]


def here(host: Host = HOST, ranks: int = 4, megabits: float = 0.0) -> Cluster:
    links = (Link("loopback", ranks, 1e9, 1e-4),)
    if megabits:
        links = (
            Link("loopback", ranks // 2, 1e9, 1e-4),
            Link("wire", ranks, megabits * 1e6 / 8 / (ranks // 2), 1e-4),
        )
    return Cluster("here", Device("core", {"fp32": 1e11}, 1e10, 1e10), ranks, links, host=host)


def priced(plan: str, where: Cluster, batch: int = 16, model: str = "gpt"):
    asked = Plan.parse(plan).fill(2)
    micros = asked.micros or 1
    return price_on_host(
        MODELS[model], asked, where, micro_batch=batch // asked.dp // asked.shard // micros, micros=micros
    )


@pytest.mark.parametrize(("model", "plan"), EVERY)
def test_the_parts_add_up_to_the_step(model, plan):
    got = priced(plan, here(), model=model)
    assert together(got) == pytest.approx(got.step)


@pytest.mark.parametrize(("model", "plan"), EVERY)
def test_a_slower_wire_or_fewer_cores_never_help(model, plan):
    ranks = Plan.parse(plan).fill(2).world
    rates = (0.0, 1000.0, 100.0, 10.0)
    steps = [priced(plan, here(ranks=ranks, megabits=rate), model=model).step for rate in rates]
    assert steps == sorted(steps)
    bare = replace(HOST, curves={}, calls={})  # which were measured on so many cores
    cores = [priced(plan, here(replace(bare, cores=n), ranks), model=model).step for n in (8, 4, 2, 1)]
    assert cores == sorted(cores)


@pytest.mark.parametrize(("model", "plan"), EVERY)
def test_twice_the_batch_takes_longer_but_not_twice_as_long(model, plan):
    once, twice = priced(plan, here(), 16, model).step, priced(plan, here(), 32, model).step
    assert once < twice < 2 * once


def test_only_what_is_hidden_costs_the_cores_that_bring_it_to_the_wire():
    """A bucket that leaves while backward goes on; cores that wait for the last one have nothing else to do."""

    def more(model: Model) -> float:
        where = here(ranks=2, megabits=1000.0)
        dear = replace(where, links=(where.links[0], replace(where.links[1], work=5e-9)))
        cheap, costly = (
            price_on_host(model, Plan.parse("dp=2"), one, micro_batch=8, micros=1).step
            for one in (where, dear)
        )
        return costly - cheap

    assert more(MODEL) == pytest.approx(5e-9 * (1 << 20))  # all of the first bucket, once by each rank
    assert more(host_fit.model_of(sizes(1, 4, 64, 64))) == 0.0  # has one bucket


def test_more_shards_and_stages_need_less_memory_of_their_own():
    def own(plan: str) -> float:
        asked = Plan.parse(plan).fill(2)
        memory = memory_on_host(MODEL, asked, HOST, micro_batch=4, micros=asked.micros or 1)[1]
        return memory.params + memory.grads + memory.optim

    assert own("shard=4 zero=3") < own("shard=2 zero=3") < own("shard=2 zero=2") <= own("shard=2 zero=1")
    several = [
        own(f"shard=2 zero={zero} micros=2") for zero in (3, 2, 1)
    ]  # gradients of earlier ones are there
    assert several == sorted(set(several))
    assert own("tp=2") < own("dp=2")
    assert own("pp=2 micros=4") < own("dp=2")


def test_a_file_gives_back_what_was_measured(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(
        as_toml(FittedHost(HOST), {"memory": 2e10, "bandwidth": 3e10, "peak fp32": 9e10}, "a test")
    )
    got = cluster(str(path))
    assert got.host is not None and got.devices == 2
    again = as_toml(FittedHost(got.host), {"memory": 2e10, "bandwidth": 3e10, "peak fp32": 9e10}, "a test")
    assert again == path.read_text()
    assert priced("dp=2 pp=2 micros=4", replace(got, devices=4)).step == pytest.approx(
        priced("dp=2 pp=2 micros=4", here()).step, rel=1e-3
    )


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("cores = 0", "at least one core"),
        ("update_us = [1.0]", "3 numbers"),
        ('"all_reduce:2" = [[4096, 1.0], [1024, 2.0]]', "bytes rise"),
        ('"all_reduce" = [[4096, 1.0]]', "a list of [bytes, microseconds]"),
        ("crowd = -1.0", "not a number"),
        ("launch = true", "not a number"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line(tmp_path, line, wrong):
    key = line.partition(" = ")[0]
    text = as_toml(FittedHost(HOST), {"memory": 2e10, "bandwidth": 3e10, "peak fp32": 9e10}, "a test")
    if key in ('"all_reduce"',):
        lines = text.replace("[host.curves]", f"[host.curves]\n{line}")
    else:
        old = next(one for one in text.splitlines() if one.startswith(f"{key} = "))
        lines = text.replace(old, line)
    path = tmp_path / "bad.toml"
    path.write_text(lines)
    with pytest.raises(UsageError) as caught:
        cluster(str(path))
    assert wrong in str(caught.value)
    assert str(caught.value.where).startswith(f"{path}:")


def test_paces_are_found_again_from_steps_that_they_made():
    rows = []
    for ask in (
        (2, 4, 128, 64),
        (2, 4, 64, 128),
        (4, 5, 320, 128),
        (2, 8, 512, 64),
        (2, 4, 192, 256),
        (3, 6, 384, 32),
    ):
        for micro_batch in (1, 4, 8):
            model = host_fit.model_of(sizes(*ask, 256 if micro_batch > 1 else 2048))
            stage = host_fit.Played(model, micro_batch, 1, {}, Plan()).first[0]
            parts = {"forward": FORWARD.of(stage.ahead), "backward": BACKWARD.of(stage.back)}
            rows.append(host_fit.Played(model, micro_batch, 1, parts, Plan()))
    forward, backward = host_fit.paces(rows)
    for row in rows:
        for part, pace in (("forward", forward), ("backward", backward)):
            counts, _ = row.first[0].pass_of(part == "backward")
            assert pace.of(counts) == pytest.approx(row.parts[part], rel=1e-6)


def test_what_waking_costs_is_told_by_the_steps_of_many_messages():
    """Two short steps that something else disturbed do not say how late a rank wakes; a long one in quiet does."""

    def played(micros: int, longer: float) -> host_fit.Played:
        plan = Plan.parse(f"pp=2 micros={micros}")
        step = price_on_host(MODEL, plan, here(true, 2), micro_batch=16 // micros, micros=micros).step
        return host_fit.Played(MODEL, 16 // micros, micros, {"step": longer * step}, plan)

    true = replace(HOST, calls={**HOST.calls, "pp": 3e-4})
    assert host_fit.waking(HOST, [played(2, 1.0), played(16, 1.0)])["pp"] == pytest.approx(3e-4, rel=1e-3)
    rows = [played(2, 1.3), played(2, 1.5), played(16, 1.0)]
    assert host_fit.waking(HOST, rows)["pp"] == pytest.approx(3e-4, rel=1e-3)


@settings(deadline=None)
@given(st.lists(st.floats(1e-5, 10.0), min_size=1, max_size=12))
def test_curves_never_fall_and_keep_what_already_rises(seconds):
    alone = [("message", 1 << (10 + i), s) for i, s in enumerate(seconds)]
    curve = host_fit.curves(2, alone, [])["message:2"]
    assert all(a <= b * (1 + 1e-12) for a, b in zip(curve.seconds, curve.seconds[1:], strict=False))
    if seconds == sorted(seconds):
        assert curve.seconds == pytest.approx(tuple(seconds))
    for size, value in zip(curve.nbytes, curve.seconds, strict=True):
        assert curve.at(size) == pytest.approx(value)
    assert curve.at(curve.nbytes[-1] * 3) == pytest.approx(3 * curve.seconds[-1])


def test_all_forwards_first_keep_what_every_loss_is_made_from():
    """The player keeps each micro-batch's loss until its backward: log-probabilities of all tokens, in fp32."""

    def kept(plan: str, vocab: int) -> float:
        asked, model = Plan.parse(plan).fill(2), replace(MODEL, vocab=vocab)
        return memory_on_host(model, asked, HOST, micro_batch=4, micros=asked.micros or 1)[1].activations

    for plan in ("micros=4", "pp=2 micros=4"):
        few, many = (kept(f"{plan} schedule={name}", 60000) - kept(f"{plan} schedule={name}", 50000)
                     for name in ("1f1b", "gpipe"))  # fmt: skip
        assert many - few == pytest.approx(3 * 4.0 * 4 * MODEL.context * 10000)


def test_the_optimiser_of_the_recipe_is_what_is_kept():
    own = [
        memory_on_host(replace(MODEL, states=n), Plan(), HOST, micro_batch=4, micros=1)[1] for n in (0, 1, 2)
    ]
    assert [one.optim for one in own] == [n * own[0].params for n in (0, 1, 2)]


def test_an_update_moves_what_the_optimiser_keeps():
    """Adam's is what was measured; of its seven numbers an element SGD moves three, with a velocity five."""
    bare = replace(HOST, update=(0.0, 0.0, 1e-9), curves={})
    each = [
        price_on_host(replace(MODEL, states=n), Plan(), here(bare), micro_batch=4, micros=1)
        for n in (2, 1, 0)
    ]
    assert [one.optimizer / each[0].optimizer for one in each] == pytest.approx([1.0, 5 / 7, 3 / 7])


LATER = ("interleaved:v=2", "looped_bfs:v=2", "zb1p", "zb2p", "zbv", "dualpipe", "dualpipev")


@pytest.mark.parametrize("name", LATER)
def test_every_timetable_has_a_price_and_computes_the_same(name):
    """Several stages a rank, or weight gradients apart: the same work in another order."""
    plan = Plan.parse(f"pp=2 micros=4 schedule={name}")
    other = replace(plan, schedule="1f1b")
    for where in (here(ranks=2), here(replace(HOST, cores=1), 2)):
        got, usual = (price_on_host(MODEL, one, where, micro_batch=4, micros=4) for one in (plan, other))
        if where.host is not None and where.host.cores > 1:  # else work takes longer while others work too
            assert got.arithmetic == pytest.approx(usual.arithmetic, rel=1e-9)
        assert 0.0 <= got.idle < 0.5 * got.step


@pytest.mark.parametrize(
    "plan", [*PLANS, "dp=2 recompute=auto", *(f"pp=2 micros=4 schedule={name}" for name in ("gpipe", *LATER))]
)
def test_the_picture_of_a_step_is_the_step_that_was_priced(plan):
    """On devices the price lets messages keep both of their rows; here both are one play, to the last digit."""
    where = replace(here(), device=Device("cpu", {"fp32": 1e11}, 1e12, 1e11))
    asked = Plan.parse(plan).fill(Plan.parse(plan).world)
    ask = Question(MODEL, asked, where, stack("plain-cpu"), 4, asked.micros or 1)
    answer = simulate(ask)
    drawn = timeline(ask, answer.price)
    assert drawn.length == pytest.approx(answer.price.step, rel=1e-12)
    assert len(drawn.placed) == sum(map(len, drawn.timetable.rows))
    assert {p.row for p in drawn.placed} == set(range(asked.pp))


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_what_was_not_measured_has_no_price(precision):
    ask = Question(MODEL, Plan.parse(f"dp=2 precision={precision}"), here(), stack("plain-cpu"), 4, 1)
    for asked in (
        lambda: simulate(ask),
        lambda: verdict(ask),
    ):
        with pytest.raises(UsageError, match=f"precision={precision}") as caught:
            asked()
        assert caught.value.code == "C22" and "fp32" in caught.value.fix


@pytest.mark.parametrize("name", LATER)
def test_what_would_help_a_host_is_told_for_every_timetable(name):
    where = replace(here(), device=Device("cpu", {"fp32": 1e11}, 1e12, 1e11))
    ask = Question(MODEL, Plan.parse(f"pp=2 micros=4 schedule={name}"), where, stack("plain-cpu"), 4, 4)
    assert sensitivities(ask)


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_positions_that_are_dealt_cost_what_they_send(kind):
    alone, got = priced("dp=1", here()), priced(f"cp=2 cp_kind={kind}", here(ranks=2))
    assert got.comm["cp"].bytes > 0 and got.comm["cp"].exposed > 0
    assert got.arithmetic < alone.arithmetic  # half of the positions each


@pytest.mark.parametrize("keys", ["dp=2 precision=bf16", "dp=2 sync=local_sgd:h=4"])
def test_what_a_host_was_measured_without_is_refused(keys):
    plan = Plan.parse(keys)
    with pytest.raises(UsageError, match="has no price on here") as caught:
        simulate(Question(MODEL, plan, here(ranks=2), stack("plain-cpu"), 4, 1))
    assert caught.value.code == "C22"


def test_what_each_axis_takes_is_its_own():
    got = priced("shard=2 tp=2", here())
    alone = {axis: priced(f"{axis}=2", here()).comm[axis] for axis in ("shard", "tp")}
    assert all(got.comm[axis].exposed > 0.3 * alone[axis].exposed for axis in alone)
    whole = sum(got.comm[axis].exposed for axis in alone) + got.arithmetic + got.idle + got.uneven
    assert whole == pytest.approx(got.step - got.optimizer - got.fixed)


def test_a_pipeline_that_fills_while_others_wait_is_never_less_than_idle():
    for micros in (1, 2, 4):
        for where in (here(), here(replace(HOST, cores=1), 4)):
            answer = simulate(Question(MODEL, Plan.parse("dp=2 pp=2"), where, stack("plain-cpu"), 4, micros))
            assert answer.price.idle >= 0.0 and 0.0 <= answer.bubble < 1.0


def test_networks_on_a_measured_host_are_priced_with_the_software_of_a_host(tmp_path):
    """Files of earlier versions name the stack of accelerators, whose step alone takes 38 ms."""
    device = {"memory": 2e10, "bandwidth": 3e10, "peak fp32": 9e10}
    text = as_toml(FittedHost(HOST), device, "a test")
    for name, said in (("new", text), ("old", text.replace("plain-cpu", "plain"))):
        path = tmp_path / f"{name}.toml"
        path.write_text(said)
        assert cluster(str(path)).stack == "plain-cpu"


@pytest.mark.parametrize("name", MODELS)
def test_a_host_prices_every_kind_of_model_by_what_it_measured(name):
    """Twice the seconds for everything that was measured are twice the step, so nothing comes from elsewhere."""

    def slower(pace: Pace) -> Pace:
        return Pace(**{f.name: 2 * getattr(pace, f.name) for f in fields(Pace)})

    host = replace(HOST, curves={}, calls={}, copies={})
    twice = replace(
        host, forward=slower(FORWARD), backward=slower(BACKWARD), step=2 * HOST.step,
        update=(2 * HOST.update[0], 2 * HOST.update[1], 2 * HOST.update[2]),
    )  # fmt: skip
    ask = Question(MODELS[name], Plan(), here(host, ranks=1), stack("plain"), 4, 2)
    once, again = simulate(ask), simulate(replace(ask, cluster=here(twice, ranks=1)))
    assert again.price.step == pytest.approx(2 * once.price.step)
    assert once.verdict.memory.params == 4 * MODELS[name].workload.parameters


def test_experts_cost_what_tokens_meet_and_hold_what_all_have():
    few, many = (replace(MODEL, experts=Experts(n, 2, 256)) for n in (4, 16))
    steps = [simulate(Question(one, Plan(), here(ranks=1), stack("plain"), 4, 1)) for one in (few, many)]
    assert steps[0].price.step < steps[1].price.step < 1.5 * steps[0].price.step
    grown = steps[1].verdict.memory.params - steps[0].verdict.memory.params
    assert grown == 4 * 4 * 12 * (2 * 128 * 256 + 256 + 128 + 128)


@pytest.mark.parametrize("text", ["ep=2 shard=2", "cp=2", "dp=2 sync=local_sgd:h=4"])
def test_what_was_never_measured_on_a_host_is_refused_for_every_model(text):
    dealt = "cp" in text or "ep" in text  # of models with attention these are priced
    for model in MODELS.values():
        if dealt and attending(model) is not None:
            continue
        with pytest.raises(UsageError) as caught:
            simulate(Question(model, Plan.parse(text), here(ranks=2), stack("plain"), 4, 1))
        assert caught.value.code == "C22"
