"""Updates that are made while the next forward has begun: the same bits, whoever looks, and nothing that cannot be."""

import math

import pytest
import torch

from tests.threads import context
from tests.train.small import recipe, started
from unisono.config import Recipe, TrainConfig, resolve
from unisono.spec.errors import ConfigProblems
from unisono.sync import Verdict
from unisono.train.state.run_state import pieces_of
from unisono.train.step.train_step import train
from unisono_contrib.comm.thread_group import Handed
from unisono_contrib.comm.threads import run as on_threads
from unisono_contrib.sync import _priority
from unisono_contrib.train.step.ahead import run_ahead

SLICES = "sync=priority:slice=0.001"  # a KiB, of which the largest tensors have several
STEPS = 6


def played(told, plan, ranks, *, ahead=False, stop=lambda step: False, spoilt=lambda rank, step: False):
    """Of each rank: reports, and the run's pieces after each step where nothing is under way, by updates made."""

    def live(rank):
        run, feed, _ = started(context(rank, ranks), told, f"dp={ranks} {plan}")
        assert not ahead or run_ahead(run, told.train) == ""
        last = run.local.slots[-1].live
        last.register_hook(lambda grad: grad * (math.nan if spoilt(rank, run.step) else 1.0))
        reports, kept = [], {0: copies(run)}
        for report in train(run, feed, STEPS, lambda: stop(run.step)):
            reports.append(report)
            if not getattr(run.gradients, "_left", None):
                kept[run.step] = copies(run)
        return reports, kept

    return on_threads(ranks, live)


def copies(run):
    return {piece.name: piece.tensor.clone() for piece in pieces_of(run)}


def same(some, others):
    return all(torch.equal(one, others[name]) for name, one in some.items())


@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), (4, 2)])
def test_weights_and_state_have_the_bits_of_updates_in_one_piece(tmp_path, ranks, micro):
    told = recipe(tmp_path, steps=STEPS, clip=0.0, save_every=4, eval_every=0, micro_batch=micro)
    wanted = played(told, SLICES, ranks)
    got = played(told, SLICES, ranks, ahead=True)
    for (reports, kept), (whole, known) in zip(got, wanted, strict=True):
        assert {report.verdict for report in whole} == {Verdict.APPLY}
        assert [report.verdict is Verdict.REMOTE for report in reports] == [1, 0, 1, 0, 1, 0]
        assert set(kept) == {0, 2, 4, 6}  # where times were taken, a checkpoint is due, and at the end
        assert all(same(kept[step], known[step]) for step in kept)
        assert [r.loss for r in reports] == [r.loss for r in whole]
        norms = {step: r.norm for step, r in enumerate(reports) if not math.isnan(r.norm)}
        norms |= {step - 1: r.says["grad_norm_before"] for step, r in enumerate(reports) if r.says}
        assert norms == pytest.approx(dict(enumerate(r.norm for r in whole)), rel=1e-12)


def test_two_replicas_have_the_bits_of_every_step(tmp_path):
    """Two numbers have one sum, wherever gradients are cut."""
    told = recipe(tmp_path, steps=STEPS, clip=0.0, save_every=0, eval_every=0)
    (_, got), _ = played(told, SLICES, 2, ahead=True)
    (_, wanted), _ = played(told, "sync=every_step", 2)
    assert same(got[STEPS], wanted[STEPS])


def test_a_gradient_that_is_not_finite_changes_nothing_anywhere(tmp_path):
    told = recipe(tmp_path, steps=STEPS, clip=0.0, save_every=0, eval_every=0)
    known = played(told, SLICES, 2)
    for reports, kept in played(
        told, SLICES, 2, ahead=True, spoilt=lambda rank, step: rank == 1 and step == 3
    ):
        last = reports[-1]
        assert (len(reports), last.step, last.finite, last.verdict) == (4, 3, False, Verdict.DISCARD)
        assert math.isfinite(last.loss) and same(kept[3], known[0][1][3])


def test_a_run_that_is_asked_to_stop_is_whole(tmp_path):
    told = recipe(tmp_path, steps=STEPS, clip=0.0, save_every=0, eval_every=0)
    known = played(told, SLICES, 2)
    for reports, kept in played(told, SLICES, 2, ahead=True, stop=lambda step: step == 2):
        assert reports[-1].stop and len(reports) == 3
        assert same(kept[3], known[0][1][3])


def test_the_trace_of_a_step(tmp_path, monkeypatch):
    """Sums begin before backward ends; then the first layer's slice arrives first, and the others in forward's order.

    No sum is known to be over before somebody waits for it, as on a link that is slower than backward. What depends on
    measured times is tested for itself; here slices depart as their gradients come."""
    monkeypatch.setattr(Handed, "is_completed", lambda self: False)
    monkeypatch.setattr(Handed, "get_future", None)
    monkeypatch.setattr(_priority, "timetable", lambda ready, *_: [(at, 3) for at in range(len(ready))])
    told = recipe(tmp_path, steps=STEPS, clip=0.0, save_every=0, eval_every=0, global_batch=4, micro_batch=1)

    def live(rank):
        run, feed, _ = started(context(rank, 4), told, f"dp=4 {SLICES},window=3")
        assert run_ahead(run, told.train) == ""
        for report in train(run, feed, 5):
            run.recorder.keep = report.step == 2 or run.recorder.keep
        return run.recorder.take(), [slot.name for slot in run.local.slots if not slot.alias]

    for spans, names in on_threads(4, live):
        first, second = (s for s in spans if s.kind == "backward" and "op" not in s.tags)
        slices = [s for s in spans if "slice" in s.tags and first.start_ns <= s.start_ns < second.start_ns]
        assert min(s.start_ns for s in slices) < first.stop_ns
        waits = [s for s in slices if s.tags["exposed"]]
        assert all(s.start_ns > first.stop_ns and s.tags["step"] == 5 for s in waits)
        arrived = [s.tags["slice"] for s in sorted(waits, key=lambda s: s.stop_ns)]
        turns = [names.index(name.partition("[")[0]) for name in arrived]
        assert (
            len(arrived) == len(set(arrived)) and turns[3] == 0
        )  # three had departed, as the window lets them
        assert turns[3:] == sorted(turns[3:]) and min(turns[:3]) > 0


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ("dp=2 pp=2 sync=priority", "P27"), ("dp=2 tp=2 sync=priority", "P27"), ("dp=2 shard=2 sync=priority", "P27"),
        ("dp=2 sync=priority precision=fp16", "P27"), ("dp=2 sync=priority offload=optimizer", "P27"),
        ("dp=2 sync=priority codec=int8", "P21"), ("dp=2 sync=priority codec=cast:bf16+ef", "P21"),
        ("dp=1 sync=priority", "P16"),
    ],
)  # fmt: skip
def test_what_it_cannot_be_played_with_is_refused(plan, code):
    with pytest.raises(ConfigProblems) as found:
        resolve(Recipe(train=TrainConfig(global_batch=8)), plan)
    assert [problem.code for problem in found.value.problems] == [code]


@pytest.mark.parametrize(
    ("given", "plan", "word"),
    [({"clip": 1.0}, "", "clip"), ({"clip": 0.0, "dtype": "float32"}, "precision=bf16:params", "masters")],
)
def test_why_every_update_waits_is_said(tmp_path, given, plan, word):
    told = recipe(tmp_path, steps=2, **given)

    def live(rank):
        run, feed, _ = started(context(rank, 2), told, f"dp=2 {SLICES} {plan}")
        said = run_ahead(run, told.train)
        return said, [report.verdict for report in train(run, feed, 2)]

    for said, verdicts in on_threads(2, live):
        assert word in said and verdicts == [Verdict.APPLY] * 2
