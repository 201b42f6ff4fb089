"""A fuzz draws the same cases from the same seed, refuses little, proves what is right, and shrinks what is wrong."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.verify.fuzzed import ENTRY, search
from unisono.spec.errors import UsageError
from unisono_contrib.verify.fuzz.draw import DIMENSIONS, MOST_RANKS, FuzzCase, documents
from unisono_contrib.verify.fuzz.run import (
    drawn,
    failure_of,
    fuzz,
    is_wrong,
    plan_of,
    proofs_of,
    shrink,
)

pytestmark = pytest.mark.timeout(300)
FAMILIES = {
    "a group that is not the usual one, beside other axes": {"tp", "cp", "pp", "dp", "ep"},
    "clipping by a norm over weights that are cut": {"train.clip", "tp", "shard"},
    "loss by the targets of one rank": {"data.packing", "cp", "dp"},
    "gradients of experts and their router": {"model.kind", "model.router", "model.aux_loss", "ep", "tp"},
    "weights with two uses on two stages": {"model.tie_embeddings", "pp"},
    "biases and norms that all ranks of tp have": {"model.bias", "model.norm", "tp"},
    "accumulation": {"train.global_batch", "train.micro_batch"},
    "optimisers over parts of a weight": {"train.optimizer", "zero", "shard"},
    "dropout that ranks draw alike": {"model.dropout", "recompute"},
}
"""What public reports of silent bugs in composed parallelism are about (NVIDIA/Megatron-LM#7452 and others)."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return documents(tmp_path_factory.mktemp("texts"))


def test_each_family_of_public_bugs_is_a_dimension() -> None:
    for family, keys in FAMILIES.items():
        assert keys <= set(DIMENSIONS), family


def test_a_seed_draws_the_same_and_another_one_others(texts: Path) -> None:
    first, again, other = (drawn(seed, 4, texts) for seed in (1, 1, 2))
    assert first == again and first != other


def test_every_value_is_drawn_and_most_plans_are_played(texts: Path) -> None:
    seen, refused, plans = Counter[str](), 0, 0
    for number in range(150):
        cases, no = drawn(5, number, texts)
        seen.update(key for case in cases for key, _ in case.values())
        plans, refused = plans + len(cases), refused + sum(no.values())
        assert all(plan_of(case).world <= MOST_RANKS for case in cases)
    assert set(seen) == set(DIMENSIONS), set(DIMENSIONS) - set(seen)
    assert plans > 600 and refused < 4 * plans


def test_drawn_plans_are_as_one_device(texts: Path) -> None:
    result = fuzz(8, seed=3, texts=texts, jobs=1)
    assert not result.failures and result.proven >= 8


TINY_GPT = {
    "train.lr": 0.01, "train.steps": 8, "model.kind": "gpt", "model.n_layer": 2, "model.n_head": 4,
    "model.d_model": 16, "model.context": 8, "train.global_batch": 8, "train.micro_batch": 1, "train.clip": 0.5,
}  # fmt: skip
TINY_CONVNET = {
    "train.lr": 0.01, "train.steps": 8, "model.kind": "convnet", "model.channels": 4, "model.n_layer": 2,
    "data.source": "digits", "train.global_batch": 8, "train.micro_batch": 1,
}  # fmt: skip
SINGLE, DOUBLE = {"train.dtype": "float32"}, {"train.dtype": "float64"}
FOUND = {
    "a step that overflows is played again": FuzzCase(
        TINY_GPT | SINGLE | {"seed": 168, "model.context": 16, "model.positions": "rotary", "train.clip": 0.0},
        {"tp": "2", "precision": "fp16"},
    ),
    "stages hand on what one device hands on": FuzzCase(
        TINY_CONVNET | SINGLE | {"seed": 802}, {"pp": "2", "precision": "bf16"}
    ),
    "ReLU's derivative jumps": FuzzCase(
        TINY_CONVNET | SINGLE | {"seed": 922, "train.weight_decay": 0.0}, {"tp": "4", "precision": "fp16"}
    ),
    "gradients of an RMSNorm have the parameter's precision": FuzzCase(
        TINY_GPT | SINGLE | {"seed": 617, "model.norm": "rms", "model.bias": False, "train.micro_batch": 2},
        {"shard": "2", "zero": "3", "precision": "bf16:params"},
    ),
    "a sum on its way has lost what its codec loses": FuzzCase(
        TINY_CONVNET | DOUBLE | {"seed": 783, "train.clip": 0.05},
        {"dp": "2", "sync": "delayed", "codec": "cast:bf16"},
    ),
    "a rate follows gradients that were rounded": FuzzCase(
        {
            "train.lr": 0.01, "train.steps": 8, "model.kind": "mlp", "model.hidden": (12, 10, 8),
            "data.source": "digits", "train.global_batch": 8, "train.micro_batch": 1, "train.lora_rank": 2,
            "train.optimizer": "adascale", "train.clip": 0.0, "ema.decay": 0.9, "seed": 202,
        } | SINGLE,
        {"shard": "2", "tp": "2", "zero": "3", "precision": "bf16:stochastic"},
    ),
    "votes follow values that were rounded": FuzzCase(
        TINY_GPT | SINGLE | {
            "seed": 134, "model.kind": "moe", "model.n_experts": 6, "model.top_k": 2, "model.bias_rate": 0.01,
            "model.capacity_factor": 1.0,
        },
        {"cp": "2", "cp_kind": "ring", "precision": "bf16:fp8"},
    ),
}  # fmt: skip
"""Wrong by a fuzz once, each for a reason of its own."""


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND.keys())
def test_what_a_fuzz_found_once_is_not_wrong(case: FuzzCase) -> None:
    (proof,) = proofs_of([case])
    assert not is_wrong(proof) and proof.cause != "refused", f"{case.command()}: {proof.first_divergence}"


@pytest.mark.slow
def test_a_planted_bug_is_found_and_shrunk(texts: Path) -> None:
    found = search(["loss_by_local_tokens"], 16, 1, texts)
    assert list(found) == ["loss_by_local_tokens"]
    for number in range(2):
        for case in drawn(1, number, texts)[0]:
            (proof,) = proofs_of([case], ENTRY, ["loss_by_local_tokens"])
            if is_wrong(proof):
                small = shrink(failure_of(case, proof), ENTRY, ["loss_by_local_tokens"]).small
                assert small is not None and len(small.words) == 1 and set(small.words) <= {"dp", "shard"}, (
                    small
                )
                return
    raise AssertionError("nothing was found")


@pytest.mark.slow
def test_the_command_proves_and_counts() -> None:
    words = [sys.executable, "-m", "unisono", "verify", "--fuzz", "8", "--seed", "3", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["pass"] and said["results"] == [] and said["fuzz"]["proven"] >= 8
    assert said["fuzz"]["seen"] and all(number > 0 for number in said["fuzz"]["refused"].values())


def test_what_a_command_prints_is_read_again(texts: Path) -> None:
    case = next(
        case for number in range(40) for case in drawn(2, number, texts)[0] if "train.freeze" in case.keys
    )
    assert "'[\"blocks.0.*\"]'" in case.command()


def test_refusals_name_their_kind(texts: Path) -> None:
    cases = [drawn(6, number, texts)[1] for number in range(10)]
    assert all(kind.startswith("U-") for refused in cases for kind in refused)
    with pytest.raises(UsageError):
        plan_of(type(drawn(6, 0, texts)[0][0])({"train.micro_batch": 5, "train.global_batch": 4}, {}))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [11, 12])
def test_hundreds_of_drawn_plans_are_as_one_device(texts: Path, seed: int) -> None:
    result = fuzz(250, seed=seed, texts=texts)
    assert not result.failures, [failure.as_dict() for failure in result.failures]
