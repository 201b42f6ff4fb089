"""Samplers as processes beside ranks: they have the weights that they were sent, or the run ends with one error."""

from typing import Any

import pytest

from tests.train.samplers import standing
from unisono.launch.fork_server import ForkServer
from unisono.launch.run.membership import Role, RunSpread
from unisono.spec.errors import UnisonoError

pytestmark = pytest.mark.timeout(120)


def played(
    nursery: ForkServer, trainers: int = 1, samplers: int = 2, function: str = "play", **kwargs: Any
) -> Any:
    """What rank 0 returns; samplers stand beside the ranks."""
    argument = {
        "module": standing.__name__, "file": standing.__file__, "function": function, "group": False, "kwargs": kwargs,
    }  # fmt: skip
    roles = (*[Role.TRAINER] * trainers, *[Role.SAMPLER] * samplers)
    spread = RunSpread("", trainers, roles=roles)
    outcome = nursery.run(argument, trainers, timeout=60.0, backend="gloo", recovers=True, spread=spread)
    if outcome.error is not None:
        raise outcome.error
    return outcome.results[0]["value"]  # type: ignore[index]


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_samples_are_of_the_version_that_the_bound_says(nursery: ForkServer, bound: int) -> None:
    """The samples of step t are drawn from version t - bound, by all samplers, and are the model's own bits."""
    result = played(nursery, bound=bound, steps=5)
    assert result["versions"] == [max(0, step - bound) for step in range(5) for _ in range(3)]
    assert all(result["equal"])


@pytest.mark.parametrize(
    "holder, tensors",
    [
        ("KeepsOld", ["out.weight", "square.bias", "square.weight", "tok.weight"]),
        ("MissesOne", ["square.bias"]),
        ("Transposes", ["square.weight"]),
        ("MissesTie", ["out.weight"]),
        ("RoundsDtype", ["out.weight", "square.bias", "square.weight", "tok.weight"]),
        ("HoldsHalf", ["out.weight", "square.bias", "square.weight", "tok.weight"]),
        ("Unapplied", []),
    ],
)  # fmt: skip
def test_a_sampler_with_other_weights_is_found_in_one_sync(
    nursery: ForkServer, holder: str, tensors: list[str]
) -> None:
    result = played(nursery, holder=holder)
    assert (result["code"], result["version"], result["tensors"]) == ("O05", 0, tensors), result
    assert result["step"] == 0 and "sampler 0" in result["text"]


@pytest.mark.parametrize("bound", [0, 1])
def test_a_sampler_that_keeps_old_weights_later_is_found_at_that_version(
    nursery: ForkServer, bound: int
) -> None:
    """Before any sample of that version is trained, whatever the bound."""
    result = played(nursery, holder="FrozenAfter", bound=bound, steps=5)
    assert (result["code"], result["version"]) == ("O05", 2), result
    assert result["step"] <= 2 + bound


def test_an_acknowledgement_of_an_older_version_is_an_error(nursery: ForkServer) -> None:
    result = played(nursery, holder="SaysOldVersion")
    assert (result["code"], result["version"], result["step"]) == ("O05", 1, 1)
    assert "it says version 0" in result["text"]


def test_a_killed_sampler_is_replaced_and_nothing_is_lost(nursery: ForkServer) -> None:
    """The new process gets the weights and the requests that were not answered."""
    result = played(nursery, 1, 1, "lose", how="killed")
    assert result == {"versions": [0, 0, 1, 1, 2, 2], "births": 2}


def test_a_sampler_that_is_killed_again_and_again_ends_the_run_with_one_error(nursery: ForkServer) -> None:
    with pytest.raises(UnisonoError) as caught:
        played(nursery, 1, 1, "lose", how="killed", losses=99)
    assert caught.value.code == "L15" and "sampler 0 is lost" in caught.value.what


def test_a_stopped_sampler_ends_the_run_with_one_error(
    nursery: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnisonoError) as caught:
        played(nursery, 1, 1, "lose", how="stopped")
    assert caught.value.code == "L15" and "it says nothing for" in caught.value.what


@pytest.mark.parametrize(
    "how, text", [("raises", "a reward that does not parse"), ("never", "no model for this")]
)
def test_a_sampler_that_raises_ends_the_run_with_its_own_error(
    nursery: ForkServer, how: str, text: str
) -> None:
    with pytest.raises(UnisonoError) as caught:
        played(nursery, 1, 1, "lose", how=how)
    assert caught.value.code == "R01" and text in caught.value.what
