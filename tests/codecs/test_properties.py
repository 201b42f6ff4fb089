"""What every codec of ours keeps to, whatever it sends: error, zeros, overflow, bytes, remains; and momentum."""

import pytest
import torch

from tests.codecs.meeting import Meeting, drawn
from tests.codecs.test_training import replicas_agree, trained
from tests.train.step.test_gradients import text  # noqa: F401
from unisono.codecs import CODECS
from unisono.codecs._marks.ef import LEFT, FedCoder
from unisono.codecs._parcel import kept_of
from unisono.config import Recipe, TrainConfig, resolve
from unisono.spec.errors import ConfigProblems, UsageError

SHAPES = [(7, 37), (1,), (3, 5, 17), (0, 4), (), (64, 9)]
BLOCKS = ["int8", "int8:dense=0", "int4", "int4:dense=0", "qsgd", "qsgd:levels=7,dense=0", "qsgd:levels=1"]
BLOCKS += ["sign", "sign:dense=0", "cast:bf16", "cast:fp16", "cast:fp8"]
OTHERS = ["topk:ratio=0.1", "threshold:ratio=0.1", "randomk:ratio=0.1", "block:ratio=0.2", "powersgd:r=2"]
OTHERS += ["chunktopk", "chunktopk:chunk=64,values=bf16"]
WAYS = {"Sum": 2.0, "Deal": 1.0, "Gather": 0.0}  # times (d-1)/d of what is handed in; a gather: d-1 times

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("dp", [1, 2, 5])
@pytest.mark.parametrize("name", [*BLOCKS, *OTHERS])
def test_the_sum_is_within_its_error_and_its_bytes_are_declared(name: str, dp: int) -> None:
    codec, meeting = CODECS.read(name), Meeting(name, SHAPES, replicas=dp, seed=5)
    grads = drawn(meeting.numel, *range(dp))
    total, whole = meeting.step(grads), torch.stack(grads).sum(0)
    assert (total - whole).norm() <= codec.error * whole.norm()
    sent = sum(n * WAYS[op] * (dp - 1) / dp or n * (dp - 1) for op, n in meeting.requests[0])
    work = codec.work(SHAPES, 8, dp)
    often = sum(call.nbytes for call in work.calls)  # also what travels in some steps alone, as in the first
    assert abs(sent - often) <= 16 * len(work.calls)


@pytest.mark.parametrize("name", [*BLOCKS, *OTHERS])
def test_zeros_stay_zeros_and_what_is_not_finite_arrives(name: str) -> None:
    zeros = [torch.zeros(sum(torch.Size(s).numel() for s in SHAPES)).double()] * 2
    assert not Meeting(name, SHAPES).step(zeros).any()
    for bad in (torch.nan, torch.inf, -torch.inf):
        grads = drawn(len(zeros[0]), 1, 2)
        grads[1][11] = bad
        assert not Meeting(name, SHAPES).step(grads).isfinite().all()


@pytest.mark.parametrize("name", [name for name in (*BLOCKS, *OTHERS) if CODECS.read(name).contracts])
def test_with_feedback_all_sums_and_what_is_left_are_all_gradients(name: str) -> None:
    meeting = Meeting(f"{name}+ef", SHAPES, replicas=3, seed=2)
    whole = came = torch.zeros(meeting.numel).double()
    for step in range(6):
        grads = drawn(meeting.numel, 3 * step, 3 * step + 1, 3 * step + 2)
        whole, came = whole + sum(grads), came + meeting.step(grads)
    came = came + sum(memory["left"] for memory in meeting.memories)
    near = 0.1 if CODECS.read(name).linear and name.startswith("cast") else 1e-5
    assert (came - whole).norm() <= near * whole.norm()


GROWS = ["qsgd:levels=1", "ternary", "randomk:ratio=0.5,unbiased=true", "randomk:ratio=0.25,unbiased=true"]
STAYS = [
    "qsgd:levels=2",
    "ternary:clip=1",
    "ternary:clip=1.9",
    "randomk:ratio=1,unbiased=true",
    "sign",
    "int4",
]


@pytest.mark.parametrize("name", [*GROWS, *STAYS])
def test_what_is_kept_stays_bounded_where_a_codec_says_that_it_contracts(name: str) -> None:
    meeting, sizes = Meeting(name, [(32, 64)], seed=2), []
    meeting.coders = [FedCoder(coder) for coder in meeting.coders]
    for memory in meeting.memories:
        memory.kept = {**memory.kept, LEFT: torch.zeros(meeting.numel, dtype=meeting.dtype)}
    for step in range(60):
        meeting.step(drawn(meeting.numel, 2 * step, 2 * step + 1))
        sizes.append(meeting.memories[0][LEFT].norm().item())
    assert CODECS.read(name).contracts is (name in STAYS)
    assert (sizes[-1] <= 1.5 * sizes[9]) is (name in STAYS)


@pytest.mark.parametrize("mark", ["ef", "ef21"])
@pytest.mark.parametrize("name", [*GROWS, "tests/codecs/own.py:Far"])
def test_feedback_around_what_does_not_contract_is_refused(name: str, mark: str) -> None:
    with pytest.raises(UsageError, match="would grow from step to step") as error:
        CODECS.read(f"{name}+{mark}")
    assert error.value.code == "P23"
    CODECS.read(name)


@pytest.mark.parametrize("name", ["int4", "topk:ratio=0.1", "sign"])
def test_estimates_of_ef21_add_up_to_what_is_used(name: str) -> None:
    meeting = Meeting(f"{name}+ef21", SHAPES, replicas=3)
    for step in range(4):
        total = meeting.step(drawn(meeting.numel, 3 * step, 3 * step + 1, 3 * step + 2))
    shared = torch.stack([memory["estimates"] for memory in meeting.memories]).sum(0)
    own = torch.stack([memory["estimate"] for memory in meeting.memories]).sum(0)
    assert torch.allclose(shared, total) and torch.allclose(own, total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("levels", [1, 7, 127])
def test_the_mean_of_levels_that_are_drawn_is_the_gradient(levels: int) -> None:
    """Over 600 steps; five standard deviations of a rounding that is uniform, before the sum and after it."""
    meeting, steps = Meeting(f"qsgd:levels={levels},dense=0", [(16, 16)], seed=1), 600
    grads = drawn(256, 1, 2)
    whole, mean = grads[0] + grads[1], sum(meeting.step(grads) for _ in range(steps)) / steps
    step = max(x.abs().max().item() for x in (*grads, whole)) * 2 / levels
    assert (mean - whole).abs().max() < 5 * step * 1.5 / steps**0.5


def test_small_parameters_and_vectors_travel_as_they_are() -> None:
    for name in ("int8", "int4", "qsgd:levels=1", "sign"):
        meeting = Meeting(name, [(300,), (3, 5), (64, 64)])
        grads = drawn(meeting.numel, 1, 2)
        total, whole = meeting.step(grads), grads[0] + grads[1]
        assert torch.equal(total[:315], whole[:315]) and not torch.equal(total[315:], whole[315:])


def corrected(grads, ratios, momentum):
    """Deep gradient compression (Lin et al., 2018), line by line, of one parameter: sums of each step."""
    velocity, left = ([torch.zeros_like(x) for x in grads[0]] for _ in range(2))
    for step, ratio in zip(grads, ratios, strict=True):
        total = torch.zeros_like(step[0])
        for i, g in enumerate(step):
            velocity[i] = momentum * velocity[i] + g
            left[i] = left[i] + velocity[i]
            places = left[i].abs().topk(kept_of(len(g), ratio)).indices
            total[places] += left[i][places]
            left[i][places] = velocity[i][places] = 0
        yield total


@pytest.mark.parametrize(("warmup", "ratios"), [(0, [0.01] * 10), (8, [0.25] * 2 + [0.0] * 8)])
def test_velocities_are_those_of_the_paper_and_sparsity_warms_up(warmup: int, ratios: list[float]) -> None:
    if warmup:
        ratios = [max(0.01, 0.25 * (0.01 / 0.25) ** (min(step // 2, 4) / 4)) for step in range(10)]
        assert ratios[0] == 0.25 and ratios[8] == pytest.approx(0.01) and ratios[2] < ratios[1]
    meeting = Meeting(f"topk:ratio=0.01,kind=exact,dense=0+mc:momentum=0.8,warmup={warmup}", [(40, 30)])
    grads = [drawn(1200, 2 * step, 2 * step + 1) for step in range(10)]
    for given, want in zip(grads, corrected(grads, ratios, 0.8), strict=True):
        assert torch.allclose(meeting.step(given), want, rtol=1e-12, atol=1e-12)
    sent = [nbytes for ((_, nbytes),) in meeting.requests]
    assert (sent[0] > 20 * sent[-1]) if warmup else len(set(sent)) == 1


def test_it_trains_and_where_all_is_sent_it_is_plain_descent(text, threads) -> None:  # noqa: F811
    train = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.1}
    plain = threads(trained, 2, text=text, plan="dp=2", **train)
    whole = threads(trained, 2, text=text, plan="dp=2 codec=topk:ratio=1+mc", **train)
    assert whole[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-12)
    plan = "dp=2 codec=topk:ratio=0.05+mc:momentum=0.9,warmup=4"
    found = threads(trained, 2, text=text, plan=plan, steps=6, **train)
    assert replicas_agree(found) and found[0]["losses"][-1] < found[0]["losses"][0]


@pytest.mark.parametrize(
    ("codec", "train", "words"),
    [
        ("topk+ef+ef", {}, "two would count everything twice"),
        ("plain+ef", {}, "it loses nothing that could be fed back"),
        ("randomk:unbiased=true+mc", {"optimizer": "sgd", "momentum": 0.0}, "would grow from step to step"),
        ("int8+mc", {}, "every element is sent in every step"),
        ("topk+mc", {"optimizer": "adamw"}, "divide by the root of their squares"),
        ("topk+mc", {"optimizer": "sgd", "momentum": 0.9}, "there would be two"),
        ("sign+ef", {"optimizer": "adamw"}, "divides by their size"),
        ("sign", {"optimizer": "sgd"}, "training may end nowhere"),
    ],
)
def test_what_means_nothing_together_is_refused(codec: str, train: dict, words: str) -> None:
    with pytest.raises((UsageError, ConfigProblems)) as error:
        resolve(Recipe(train=TrainConfig(**train)), f"dp=2 codec={codec}")
    found = getattr(error.value, "problems", [error.value])
    assert any(words in one.what and one.code == "P23" for one in found), found


def test_all_replicas_get_the_same_bits_in_both_precisions() -> None:
    for name in (*BLOCKS, *OTHERS):
        for dtype in (torch.float32, torch.float64):
            meeting = Meeting(name, SHAPES, replicas=3, dtype=dtype)  # which compares them
            total = meeting.step([x.to(dtype) for x in drawn(meeting.numel, 1, 2, 3)])
            assert total.dtype == dtype and total.isfinite().all()
