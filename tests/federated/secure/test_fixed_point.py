"""Fixed point: exact sums, refusals by name, and room that is checked before a round."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.spec.errors import UsageError
from unisono_contrib.federated.secure import shamir
from unisono_contrib.federated.secure.fixed_point import FixedPoint


@pytest.mark.parametrize("n", [1, 2, 3, 4, 10, 100])
def test_the_mean_is_right_for_any_number_of_clients(n: int) -> None:
    draw = np.random.default_rng(n)
    point = FixedPoint(limit=8.0, fraction_bits=32, max_weight=50)
    rows, weights = draw.uniform(-8.0, 8.0, (n, 7)), draw.integers(1, 51, n)
    total = sum(
        (point.encode({"w": x}, i, int(w)) for i, (x, w) in enumerate(zip(rows, weights))), np.uint64(0)
    )
    assert np.allclose(
        point.decode(total, int(weights.sum())), np.average(rows, axis=0, weights=weights), atol=2**-32
    )


@pytest.mark.parametrize("value", [8.0000001, -9.0, math.inf, -math.inf, math.nan])
def test_a_value_out_of_range_is_refused_by_client_and_parameter(value: float) -> None:
    values = {"stem.weight": np.zeros((2, 2)), "head.bias": np.array([1.0, value])}
    with pytest.raises(UsageError, match=r"client 17: head\.bias is beyond the limit 8") as caught:
        FixedPoint().encode(values, 17)
    assert caught.value.code == "A01"


def test_the_limit_itself_is_taken() -> None:
    point = FixedPoint()
    ends = np.array([8.0, -8.0])
    assert np.array_equal(point.decode(point.encode({"w": ends}, 1)), ends)


@given(
    limit=st.floats(0.01, 1e4),
    bits=st.integers(1, 60),
    clients=st.integers(2, 10**6),
    weight=st.integers(1, 10**6),
)
def test_what_has_room_never_wraps_and_the_advice_has_room(
    limit: float, bits: int, clients: int, weight: int
) -> None:
    point = FixedPoint(limit, bits, weight)
    worst = clients * weight * round(math.ldexp(limit, bits))
    try:
        point.require_room(clients)
    except UsageError as error:
        assert point.room(clients) < 1.0
        if (advice := error.fix.removeprefix("fraction_bits=").partition(" ")[0]).isdigit():
            FixedPoint(limit, int(advice), weight).require_room(clients)
    else:
        assert worst < 2**63 and point.room(clients) > 0.0


def test_the_lack_of_room_is_said_in_numbers() -> None:
    with pytest.raises(
        UsageError, match=r"100 clients with weights up to 1000 .* log2\(100 · 1000\) = 16.6 bits"
    ):
        FixedPoint(limit=8.0, fraction_bits=44, max_weight=1000).require_room(100)
    FixedPoint(limit=8.0, fraction_bits=43, max_weight=1000).require_room(100)


@pytest.mark.parametrize("weight", [0, -1, 51])
def test_a_weight_out_of_range_is_refused(weight: int) -> None:
    with pytest.raises(UsageError, match=f"client 3 has weight {weight}"):
        FixedPoint(max_weight=50).encode({"w": np.zeros(1)}, 3, weight)


@given(secret=st.integers(0, shamir.PRIME - 1), n=st.integers(1, 9), data=st.data())
def test_any_threshold_shares_give_the_secret(secret: int, n: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, n))
    shares = shamir.split(secret, range(1, n + 1), threshold)
    chosen = data.draw(st.permutations(range(1, n + 1)))[:threshold]
    assert shamir.joined({x: shares[x] for x in chosen}, shamir.weights_at_zero(chosen)) == secret
    if threshold > 1:
        fewer = chosen[:-1]
        assert shamir.joined({x: shares[x] for x in fewer}, shamir.weights_at_zero(fewer)) != secret


@pytest.mark.parametrize("holders, threshold", [((0, 1), 2), ((1, 1), 2), ((1, 2), 3), ((1, 2), 0)])
def test_sharing_that_would_lose_or_tell_the_secret_is_refused(
    holders: tuple[int, ...], threshold: int
) -> None:
    with pytest.raises(ValueError):
        shamir.split(5, holders, threshold)
