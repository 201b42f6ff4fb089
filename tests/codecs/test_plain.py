"""The codec that encodes nothing: one sum, of what it was given, of as many bytes as it says."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.codecs import CODECS, Sum


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4), st.integers(1, 8))
def test_it_asks_for_one_sum_and_gives_its_answer(shapes, dp):
    codec = CODECS.read("plain")
    grad = torch.arange(float(sum(a * b for a, b in shapes)))
    exchange = codec.bind().exchange(grad, [torch.Size(shape) for shape in shapes], memory := {})
    request = next(exchange)
    assert isinstance(request, Sum) and request.tensor is grad and not memory
    try:
        exchange.send(grad * dp)
        raise AssertionError("it asks again")
    except StopIteration as end:
        assert torch.equal(end.value, grad * dp)
    (call,) = codec.work(shapes, 4, dp).calls
    assert call.nbytes == 2 * grad.nbytes * (dp - 1) // dp
