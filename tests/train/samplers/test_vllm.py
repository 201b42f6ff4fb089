"""vLLM's four calls, spoken to a stand-in of its server."""

import pytest

from tests.train.samplers.standin import standing
from tests.train.samplers.standing import weights_of
from unisono_contrib.train.samplers.errors import SamplerLost, WeightsNotHeld
from unisono_contrib.train.samplers.vllm import VllmCalls, VllmSampler

pytestmark = pytest.mark.timeout(60)


def test_weights_arrive_by_the_four_calls_in_their_order() -> None:
    weights = weights_of(1)
    with standing() as server:
        sampler = VllmSampler(server.url)
        for version in (0, 1):
            sampler.publish(version, weights_of(version))
        assert all(server.model[name].equal(x) for name, x in weights.items())
        assert server.version == "1"
        calls = [
            (route, body) for route, body in server.asked if "weight_" in route and "checker" not in route
        ]
    init = calls[0][1]["init_info"]
    assert calls[0][0] == "init_weight_transfer_engine"
    assert (init.pop("master_port") > 0) and init == {
        "master_address": "127.0.0.1", "rank_offset": 1, "world_size": 2, "packed": False,
    }  # fmt: skip
    named = {
        "names": list(weights),
        "dtype_names": ["float32"] * len(weights),
        "shapes": [list(x.shape) for x in weights.values()],
    }
    routes = [(route, body) for route, body in server.asked if route.endswith(("weight_update", "weights"))]
    assert routes == [
        (route, body)
        for version in ("0", "1")
        for route, body in (
            ("start_weight_update", {}),
            ("update_weights", {"update_info": named}),
            ("finish_weight_update", {"weight_version": version}),
        )
    ]


@pytest.mark.parametrize("bug, count", [("noop", 3), ("one", 1)])
def test_a_server_that_answers_and_loads_nothing_is_found(bug: str, count: int) -> None:
    """As on a device for which its communicator disables itself: each call answers 200."""
    with standing(bug) as server:
        sampler = VllmSampler(server.url)
        sampler.publish(0, weights_of(0))
        with pytest.raises(WeightsNotHeld) as caught:
            sampler.publish(1, weights_of(1))
        assert (caught.value.code, caught.value.version, len(caught.value.tensors)) == ("O05", 1, count)


def test_weights_that_a_server_packs_are_not_taken_for_old_ones() -> None:
    """vLLM on CPUs keeps empty tensors in their place, as version 0.32 was seen to do."""
    with standing() as server:
        server.packed = {"square.weight", "square.bias"}
        sampler = VllmSampler(server.url)
        for version in range(3):
            sampler.publish(version, weights_of(version))
        assert server.version == "2"


def test_what_a_server_refuses_is_told_in_its_words() -> None:
    with standing() as server, pytest.raises(SamplerLost) as caught:
        VllmCalls(server.url).finish_weight_update(3)
    assert (
        "/finish_weight_update answers 500" in caught.value.what
        and "no update is active" in caught.value.what
    )


def test_nobody_there_is_one_error() -> None:
    with standing() as server:
        url = server.url
    with pytest.raises(SamplerLost) as caught:
        VllmSampler(url, timeout=5.0)
    assert caught.value.code == "L15" and "get_world_size" in caught.value.what
