"""Steps of users on other stacks: right ones pass, and of wrong ones the cause is named."""

from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

import unisono
from tests.library import stack_steps as steps
from unisono.launch.fork_server import ForkServer
from unisono.spec.errors import UsageError, VerifyMismatch
from unisono_contrib.library.stacks import _check
from unisono_contrib.library.stacks._rank import ENTRY

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(ENTRY) as server:
        yield server


@pytest.fixture(scope="module")
def check(server: ForkServer) -> Any:
    return partial(_check.stack_on, server, micros=2, timeout=60.0)


@pytest.fixture(scope="module")
def updates(server: ForkServer) -> Any:
    return partial(_check.updates_on, server, ranks=steps.RANKS, micros=steps.MICROS, steps=2, timeout=60.0)


def needs(*libraries: str) -> Any:
    lacking = [name for name in libraries if find_spec(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"not installed: pip install {' '.join(lacking)}")


def case(
    stack: str, step: type, library: str = "torch", slow: bool = True, ranks: int = 2, **options: Any
) -> Any:
    marks = [needs(library), *([pytest.mark.slow] if slow else [])]
    name = "-".join((stack, step.__name__, *(f"{key}={value}" for key, value in options.items())))
    return pytest.param(stack, step, ranks, options, marks=marks, id=name)


MUON = {
    "type": "Muon",
    "params": {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "standard"},
}

HEALTHY = [
    case("ddp", steps.Decaying, slow=False),
    case("ddp", steps.Momentum, static_graph=True),
    case("ddp", steps.Uneven, ranks=3),
    case("fsdp2", steps.Uneven, slow=False),
    case("fsdp2", steps.Decaying, ranks=4, reshard_after_forward=False),
    case("accelerate", steps.Decaying, "accelerate"),
    case("accelerate", steps.Uneven, "accelerate", ranks=3),
    case("lightning", steps.Decaying, "lightning"),
    case("lightning", steps.Uneven, "lightning", ranks=4),
    case("pipelining", steps.Decaying, slow=False),
    case("pipelining", steps.Uneven, schedule="ScheduleGPipe"),
    case("pipelining", steps.Digits, schedule="ScheduleInterleaved1F1B"),
    case("pipelining", steps.Momentum, schedule="ScheduleZBVZeroBubble"),
    case("torchft", steps.Decaying, "torchft"),
    case("torchft", steps.Uneven, "torchft", ranks=3),
    *(
        case("deepspeed", step, "deepspeed", zero_optimization={"stage": stage})
        for stage in range(4)
        for step in (steps.Decaying, steps.Uneven)
    ),
    case("deepspeed", steps.Matrices, "deepspeed", zero_optimization={"stage": 1}, optimizer=MUON),
    case("transformers", steps.Rows, "transformers"),
    case("trl", steps.Examples, "trl"),
    case("trl", steps.Examples, "trl", padding_free=True),
    case("jax", steps.Tree, "jax"),
    case("jax", steps.UnevenTree, "jax", ranks=4),
]


@pytest.mark.parametrize(("stack", "step", "ranks", "options"), HEALTHY)
def test_a_healthy_stack_passes(stack, step, ranks, options, check):
    verdict = check(stack, step, ranks, options=options)
    assert verdict, verdict
    assert (verdict.updates or stack == "jax") and not verdict.cause
    verdict.check()


@pytest.mark.parametrize(
    ("step", "cause", "words"),
    [
        (steps.StepsEachMicroBatch, "steps_per_micro_batch", "2 steps, one for each micro-batch"),
        (steps.NeverClips, "not_clipped", "are not clipped"),
        (steps.NeverSynced, "not_reduced", "each rank keeps its own"),
        (steps.MeansOfMeans, "loss_normalisation", "as if all had as many targets"),
        (steps.NeverZeroed, "carried_over", "what the step before had counts 1 times"),
    ],
)
def test_a_wrong_use_of_a_stack_is_named(step, cause, words, check):
    verdict = check("ddp", step)
    assert not verdict and (verdict.cause, verdict.what) == (cause, "gradients"), verdict
    assert words in str(verdict) and verdict.worst in verdict.errors
    with pytest.raises(VerifyMismatch):
        verdict.check()


@pytest.mark.parametrize("loop", [steps.right, steps.last_weights, steps.muon_right])
def test_right_weights_pass(loop, updates):
    step = steps.Muon if loop is steps.muon_right else steps.Decaying
    assert (verdict := updates(step, loop)), verdict


@pytest.mark.parametrize(
    ("step", "loop", "cause"),
    [
        (steps.Decaying, steps.without_decay, "weight_decay"),
        (steps.Decaying, steps.another_rate, "learning_rate"),
        (steps.Decaying, steps.each_micro_batch, "steps_per_micro_batch"),
        (steps.Decaying, steps.first_lost, "missing_micro_batch"),
        (steps.Momentum, steps.plain_momentum, "momentum"),
        (steps.Momentum, steps.adam_for_adamw, "optimizer_is_adam"),
        (steps.Muon, steps.muon_is_sgd, "optimizer_is_sgd"),
    ],
)
def test_the_cause_of_a_wrong_update_is_named(step, loop, cause, updates):
    verdict = updates(step, loop)
    assert not verdict and (verdict.cause, verdict.what) == (cause, "updates"), verdict


@pytest.mark.slow
@needs("jax")
def test_gradients_in_jax_that_are_summed_are_named(check):
    verdict = check("jax", steps.TreeSummed)
    assert verdict.cause == "factor_of_axis" and "4 times" in str(verdict), verdict


@pytest.mark.slow
@needs("deepspeed")
def test_a_muon_that_is_silently_sgd_is_named(check):
    """deepspeedai/DeepSpeed#8441, in 0.19.5."""
    if version("deepspeed") != "0.19.5":
        pytest.skip(f"DeepSpeed {version('deepspeed')} has it no more: pip install deepspeed==0.19.5")
    verdict = check(
        "deepspeed", steps.Matrices, options={"zero_optimization": {"stage": 0}, "optimizer": MUON}
    )
    assert (verdict.cause, verdict.what) == ("optimizer_is_sgd", "updates"), verdict


def test_what_cannot_be_checked_is_refused(check):
    with pytest.raises(UsageError, match="there is no stack 'horovod'") as unknown:
        check("horovod", steps.Digits)
    assert unknown.value.code == "V08"
    with pytest.raises(UsageError, match="cannot be cut into 8 stages"):
        check("pipelining", steps.Digits, options={"schedule": "ScheduleInterleaved1F1B", "chunks": 4})


@pytest.mark.slow
def test_the_public_call():
    assert unisono.check_stack("ddp", steps.Digits)
