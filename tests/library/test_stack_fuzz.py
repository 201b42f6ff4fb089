"""A fuzz of stacks draws the same cases from the same seed, accuses no healthy stack, and shrinks what is wrong."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest

from tests.library import wrong_trains
from tests.library.stack_fuzzed import FILE, search
from unisono.library.gradient_check import GradientVerdict
from unisono.spec.errors import UsageError
from unisono_contrib.library.stack_fuzz.case import DIMENSIONS, StackCase, case_of, parse, smaller
from unisono_contrib.library.stack_fuzz.run import (
    StackFuzz,
    StackResult,
    drawn,
    failure_of,
    fuzz_stacks,
    opened,
    playable,
    prove_stack,
)

pytestmark = pytest.mark.timeout(180)
BOTH = {name: playable(name) for name in ("ddp", "fsdp2")}


@pytest.fixture(scope="module")
def fuzz() -> Iterator[StackFuzz]:
    with opened() as fuzz:
        yield fuzz


def named(text: str, train: str = "") -> StackCase:
    (stack,), words = parse(text)
    return case_of(stack, {**words, "train": f"{FILE}:{train}" if train else ""})


def played(fuzz: StackFuzz, *cases: StackCase) -> StackResult:
    result = StackResult()
    for case in cases:
        fuzz.prove(case, result)
    return result


def test_a_seed_draws_the_same_and_another_one_others() -> None:
    first, again, other = (list(islice(drawn(BOTH, seed, {}), 20)) for seed in (1, 1, 2))
    assert first == again and first != other


def test_every_value_is_drawn() -> None:
    kinds = {name: playable(name) for name in ("ddp", "fsdp2", "pipelining")}
    seen = Counter(value for case in islice(drawn(kinds, 5, {}), 900) for value in case.values())
    values = {(key, str(value)) for key, values in DIMENSIONS.items() for value in values}
    assert values <= set(seen), values - set(seen)
    for name, kind in kinds.items():
        assert {f"{name}.{key}" for key in kind.draws or {}} <= {key for key, _ in seen}


def test_words_that_are_fixed_are_not_drawn() -> None:
    cases = islice(drawn(BOTH, 1, {"model": "gpt", "ranks": 3}), 20)
    assert {(case.words["model"], case.words["ranks"]) for case in cases} == {("gpt", 3)}


def test_what_a_case_prints_is_read_again() -> None:
    for case in islice(drawn(BOTH, 7, {}), 50):
        (stack,), words = parse(case.plan)
        assert case_of(stack, words) == case


def test_what_is_smaller_ends() -> None:
    for case in islice(drawn(BOTH, 3, {}), 20):
        for _ in range(200):
            less = next(smaller(case), None)
            if less is None:
                break
            case = less
        assert not case.options and case.words == {
            **case.words,
            "ranks": 1,
            "micros": 1,
            "steps": 1,
            "model": "mlp",
        }


@pytest.mark.parametrize(
    "text", ["ddp model=gtp", "ddp ranks=9", "ddp micros=0", "ddp clip=high", "ddp gpt", "ddp,fsdp2"]
)
def test_words_that_make_no_case_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        prove_stack(text)
    assert refused.value.code == "V12"


def test_a_failure_shows_the_least_case() -> None:
    row = failure_of(
        named("ddp micros=3"), GradientVerdict(False, 1e-12, {"w": 1.0}, "w", "factor", "twice")
    ).as_dict()
    assert row["command"] == "unisono verify --stack 'ddp micros=3'" and not row["pass"]


def test_healthy_stacks_pass_and_a_bug_is_shrunk(fuzz: StackFuzz) -> None:
    """The bug needs two micro-batches, and no option."""
    healthy = played(fuzz, named("ddp micros=2 model=gpt targets=empty optimizer=adamw clip=0.05"))
    assert healthy.proven == 1 and not healthy.failures and not healthy.refused
    case = named("ddp ranks=1 micros=3 steps=1 gradient_as_bucket_view=true", "first_micro_batch_lost")
    (failure,) = played(fuzz, case).failures
    small = fuzz.shrink(failure)
    assert small.case == case and small.small == named(
        "ddp ranks=1 micros=2 steps=1", "first_micro_batch_lost"
    )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["groups", "momentum"])
def test_what_no_micro_batch_uses_is_skipped_as_on_one_device(fuzz: StackFuzz, optimizer: str) -> None:
    cases = [
        f"ddp model=idle optimizer={optimizer} steps=3 find_unused_parameters=true",
        "fsdp2 model=idle steps=3",
    ]
    assert played(fuzz, *map(named, cases)).proven == 2
    filled = played(fuzz, named(cases[0], "unused_parameters_are_zeros"))
    assert len(filled.failures) == 1


@pytest.mark.slow
def test_tied_weights_are_in_no_two_groups_of_fsdp2(fuzz: StackFuzz) -> None:
    assert (
        played(fuzz, named("fsdp2 model=gpt micros=2"), named("fsdp2 model=moe ranks=4 replicas=2")).proven
        == 2
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stack", list(BOTH))
def test_planted_bugs_are_found_soon(fuzz: StackFuzz, stack: str) -> None:
    names = wrong_trains.named(stack)[::4]
    found = search(fuzz, stack, names, 12, 1)
    assert "right" not in found and len(found) >= 0.8 * len(names), found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_drawn_steps_are_as_one_device() -> None:
    result = fuzz_stacks("ddp,fsdp2", 100, seed=11)
    assert result.proven >= 100 and not result.failures, [failure.as_dict() for failure in result.failures]


@pytest.mark.slow
def test_a_fuzz_of_nothing_but_refusals_ends() -> None:
    with pytest.raises(UsageError, match="drawn cases were refused") as refused:
        fuzz_stacks("ddp nonsense=1", 1, seed=0)
    assert refused.value.code == "V12"


@pytest.mark.slow
def test_the_command_proves_and_counts() -> None:
    words = [
        sys.executable,
        "-m",
        "unisono",
        "verify",
        "--fuzz",
        "4",
        "--seed",
        "3",
        "--stack",
        "ddp,fsdp2",
        "--json",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["pass"] and said["results"] == [] and said["fuzz"]["proven"] >= 4
    wrong = [*words[:4], "--stack", f"ddp micros=2 train={FILE}:never_cleared"]
    assert subprocess.run(wrong, capture_output=True, text=True, timeout=170).returncode == 3
