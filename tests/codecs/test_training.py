"""Codecs in training: beside every other axis, through checkpoints and other numbers of replicas, under fp16."""

from pathlib import Path

import pytest
import torch

from tests.train.step.test_gradients import started, text  # noqa: F401
from unisono.codecs import CODECS as CODECS_THERE
from unisono.plan import Plan
from unisono.train.state.checkpoint import latest, save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train_step

pytestmark = pytest.mark.timeout(240)

CODECS = ("int8:block=64", "int4+ef", "topk:ratio=0.05+ef", "powersgd:r=2+ef")


def trained(ctx, text, plan, steps=4, first=0, folder=None, resume=None, **train):  # noqa: F811
    """Some steps on one rank; losses, weights, what is kept."""
    live, feed = started(ctx, text, "gpt", plan, **train)
    if resume is not None:
        restore(live, Path(resume))
    assert live.step == first
    reports = []
    while live.step < first + steps:
        reports.append(train_step(live, feed.fetch(live.step, live.leaves)))
    if folder is not None:
        boxes = [*pieces_of(live), *kept_of(live)]
        save(Path(folder), live.step, boxes, {"step": live.step}, rank=ctx.rank, world=ctx.world, token="t")
    own = {key: x.clone() for key, x in live.sync.state().items() if live.sync.is_private(key)}
    return {
        "at": live.mesh.at,
        "losses": [report.loss for report in reports if not report.again],
        "again": sum(report.again for report in reports),
        "weights": {slot.name: slot.master.detach().clone() for slot in live.local.slots},
        "own": own,
        "boxes": {slot.name: (slot.shape, slot.start) for slot in live.local.slots},
        "state": {key: x.clone() for key, x in live.sync.state().items()},
    }


def alike(some, others) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[key], others[key]) for key in some)


def replicas_agree(results) -> bool:
    """Ranks that differ in dp alone hold the same weights, bit by bit."""
    first = {}
    for result in results:
        place = tuple((axis, at) for axis, at in result["at"].items() if axis != "dp")
        if not alike(first.setdefault(place, result["weights"]), result["weights"]):
            return False
    return True


LAYOUTS = [("dp=2 micros=4", 2), ("dp=2 pp=2", 4), ("dp=2 tp=2", 4), ("dp=2 shard=2", 4)]
QUICK = (
    ("int8:block=64", "dp=2 tp=2"),
    ("topk:ratio=0.05+ef", "dp=2 shard=2"),
    ("powersgd:r=2+ef", "dp=2 pp=2"),
)


@pytest.mark.parametrize(
    ("codec", "plan", "ranks"),
    [
        pytest.param(codec, *layout, marks=() if (codec, layout[0]) in QUICK else pytest.mark.slow)
        for codec in CODECS
        for layout in LAYOUTS
    ],
)
def test_it_trains_inside_every_layout_and_goes_on_where_it_was(codec, plan, ranks, text, tmp_path, threads):  # noqa: F811
    plan = f"{plan} codec={codec}"
    whole = threads(trained, ranks, text=text, plan=plan, steps=4)
    assert replicas_agree(whole)
    plain = threads(trained, ranks, text=text, plan=plan.replace(f" codec={codec}", ""), steps=4)
    assert whole[0]["losses"][0] == plain[0]["losses"][0] and whole[0]["losses"] != plain[0]["losses"]
    assert whole[0]["losses"] == pytest.approx(plain[0]["losses"], rel=0.1)
    threads(trained, ranks, text=text, plan=plan, steps=2, folder=str(tmp_path))
    then = threads(trained, ranks, text=text, plan=plan, steps=2, first=2, resume=str(latest(tmp_path)))
    for one, other in zip(then, whole, strict=True):
        assert alike(one["weights"], other["weights"]) and alike(one["state"], other["state"])


@pytest.mark.parametrize("codec", ["int4+ef", "int4+ef21", "topk:ratio=0.05+ef"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_with_another_dp_nothing_of_what_is_kept_is_lost(codec, before, after, text, tmp_path, threads):  # noqa: F811
    was = threads(trained, before, text=text, plan=f"dp={before} codec={codec}", folder=str(tmp_path))
    here = str(latest(tmp_path))
    now = threads(trained, after, text=text, plan=f"dp={after} codec={codec}", steps=0, first=4, resume=here)
    assert any(x.any() for x in was[0]["own"].values())
    for key in was[0]["own"]:
        then, kept = (sum(result["own"][key] for result in results) for results in (was, now))
        torch.testing.assert_close(kept, then, rtol=1e-9, atol=1e-12)
    plan = f"dp={after} codec={codec}"
    more = threads(trained, after, text=text, plan=plan, steps=2, first=4, resume=here)
    assert replicas_agree(more) and more[0]["losses"][-1] < was[0]["losses"][0]


FIRST, SECOND = "stem.tok.weight", "head.out.weight"


def kept_in_all(results) -> dict[str, torch.Tensor]:
    """Of all ranks together, what each keeps for itself, whole; of a tied weight, of both uses."""
    found = {}
    for result in results:
        for key, x in result["own"].items():
            shape, start = result["boxes"][key.rpartition("/")[0]]
            part = found.setdefault(key.replace(SECOND, FIRST), torch.zeros(shape, dtype=x.dtype))
            part[tuple(slice(a, a + n) for a, n in zip(start, x.shape, strict=True))] += x
    return found


@pytest.mark.parametrize(
    ("plan", "sync"),
    [
        ("dp=2 codec=int4+ef", ""),
        ("dp=2 shard=2", "sync=period:3"),
        pytest.param("dp=2 pp=2 codec=int4+ef", "", marks=pytest.mark.slow),
        pytest.param("dp=2 shard=2 codec=int4+ef", "", marks=pytest.mark.slow),
        pytest.param("dp=4 codec=int4+ef", "", marks=pytest.mark.slow),
        pytest.param("dp=4", "sync=period:3", marks=pytest.mark.slow),
    ],
)
def test_what_a_second_use_of_a_tied_weight_kept_is_added_to_the_firsts(plan, sync, text, tmp_path, threads):  # noqa: F811
    codec = "codec=int4+ef" if "codec" in plan else ""
    was = threads(trained, 4, text=text, plan=f"dp=2 pp=2 {codec} {sync}", steps=2, folder=str(tmp_path))
    at = {"first": 2, "resume": str(latest(tmp_path))}
    ranks = Plan.parse(plan).world
    now = threads(trained, ranks, text=text, plan=f"{plan} {sync}", steps=0, **at)
    (folder := tmp_path / "again").mkdir()
    end = threads(trained, ranks, text=text, plan=f"{plan} {sync}", steps=3, folder=str(folder), **at)
    assert replicas_agree(end) and end[0]["losses"][-1] < was[0]["losses"][0]
    for one in now:  # a second use beside the first keeps nothing of its own
        one["own"] = {key: x for key, x in one["own"].items() if SECOND not in key or "pp" in plan}
    owns = [pair for result in was for pair in result["own"].items()]
    assert len({key for key, x in owns if key.startswith((FIRST, SECOND)) and x.any()}) == 2
    before, after = kept_in_all(was), kept_in_all(now)
    assert before.keys() == after.keys()
    for key, x in before.items():
        torch.testing.assert_close(after[key], x, rtol=1e-9, atol=1e-12)
    again = {"first": 5, "resume": str(latest(folder))}
    then = threads(trained, ranks, text=text, plan=f"{plan} {sync}", steps=0, **again)
    for one, other in zip(then, end, strict=True):
        shared = one["own"].keys() & other["own"].keys()
        assert len(shared) > 10 and all(torch.equal(one["own"][key], other["own"][key]) for key in shared)


@pytest.mark.parametrize("codec", ["int8:block=64", "int4+ef", "topk:ratio=0.05+ef"])
def test_a_step_that_overflowed_under_fp16_leaves_no_trace(codec, text, threads):  # noqa: F811
    train = {"dtype": "float32", "eps": 1e-6}
    small, large = (
        threads(trained, 2, text=text, plan=f"dp=2 codec={codec} precision=fp16:scale={scale}", **train)
        for scale in (1 << 10, 1 << 24)
    )
    assert large[0]["again"] > 0 == small[0]["again"] and replicas_agree(large)
    assert large[0]["losses"] == pytest.approx(small[0]["losses"], rel=1e-3)
    if codec.endswith("+ef"):
        for key, x in small[0]["own"].items():
            torch.testing.assert_close(large[0]["own"][key], x, rtol=0.05, atol=2e-4)


@pytest.mark.parametrize("name", ["int8", "int4+ef", "sign", "int8+ef21", "cast:fp8"])
def test_codecs_of_two_rounds_cut_what_goes_between_hosts(name: str) -> None:
    """Whatever stands around them."""
    assert CODECS_THERE.read(name).bind().cap == 1 << 20
    assert CODECS_THERE.read("topk+ef").bind().cap == CODECS_THERE.read("plain").bind().cap == 0
