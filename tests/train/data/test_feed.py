"""A feed deals the same leaves to whoever asks, and its only state is the step."""

import time
from contextlib import closing

import numpy as np
import pytest
import torch

from unisono.comm.members import Members, Shape, assign
from unisono.spec.errors import UsageError
from unisono.train.data.dataset import Images, TokenWindows
from unisono.train.data.feed import Permuted
from unisono.train.data.order import sample_ids

DATA = TokenWindows(np.random.default_rng(0).integers(0, 256, 6401, dtype=np.uint8), 64)


ALL = range(3)  # of twelve samples in leaves of four


def flat(feed: Permuted, step: int, leaves: range = ALL) -> list[torch.Tensor]:
    micros = feed.fetch(step, leaves)
    return [torch.cat([getattr(m, name) for m in micros]) for name in ("inputs", "targets", "samples")]


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_leaves_together_are_the_global_batch(micro_batch: int, ranks: int) -> None:
    leaves = 12 // micro_batch
    if leaves % ranks:
        pytest.skip("does not divide")
    whole = flat(Permuted(DATA, 3, 12, 12), 17, range(1))
    dealt = assign(leaves, Shape(dp=ranks), Members.first(ranks))
    parts = [flat(Permuted(DATA, 3, 12, micro_batch), 17, dealt[rank]) for rank in range(ranks)]
    for ours, theirs in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(ours, torch.cat(theirs))


def test_micro_holds_positions_and_counts() -> None:
    micros = Permuted(DATA, 3, 12, 4).fetch(5, range(1, 3))
    assert [m.samples.tolist() for m in micros] == [[64, 65, 66, 67], [68, 69, 70, 71]]
    assert [m.targets.numel() for m in micros] == [256, 256]
    assert all(m.inputs.dtype == m.targets.dtype == m.samples.dtype == torch.int64 for m in micros)


def test_windows_are_those_of_the_order() -> None:
    (micro,) = Permuted(DATA, 3, 12, 12).fetch(20, range(1))  # positions 240..251: in the third epoch
    for row, sample in enumerate(sample_ids(3, 240, 12, len(DATA))):
        start = int(sample) * 64
        assert micro.inputs[row].tolist() == DATA.tokens[start : start + 64].tolist()
        assert micro.targets[row].tolist() == DATA.tokens[start + 1 : start + 65].tolist()


def test_steps_may_be_asked_in_any_order() -> None:
    feed = Permuted(DATA, 3, 12, 4)
    forward = [flat(feed, step) for step in (0, 1, 2, 400)]
    backward = [flat(feed, step) for step in (400, 2, 1, 0)][::-1]
    for ours, theirs in zip(forward, backward, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_leaves_may_be_any_selection() -> None:
    """What elastic membership needs: leaves dealt in another way are the same leaves."""
    feed = Permuted(DATA, 3, 12, 2)
    every, odd = feed.fetch(9, range(6)), feed.fetch(9, range(1, 6, 2))
    for ours, theirs in zip(odd, every[1::2], strict=True):
        assert torch.equal(ours.inputs, theirs.inputs) and torch.equal(ours.samples, theirs.samples)


@pytest.mark.timeout(60)
def test_reading_ahead_changes_nothing() -> None:
    plain = Permuted(DATA, 3, 12, 4)
    with closing(Permuted(DATA, 3, 12, 4, prefetch=True)) as ahead:
        for step in (0, 1, 2, 7, 8, 3):
            assert all(map(torch.equal, flat(plain, step), flat(ahead, step)))


@pytest.mark.timeout(60)
def test_leaves_may_change_while_it_reads_ahead() -> None:
    plain = Permuted(DATA, 3, 12, 4)
    with closing(Permuted(DATA, 3, 12, 4, prefetch=True)) as ahead:
        for step, leaves in enumerate((range(3), range(1), range(1, 3), range(0, 3, 2), range(3))):
            assert all(map(torch.equal, flat(plain, step, leaves), flat(ahead, step, leaves)))


@pytest.mark.timeout(60)
def test_an_error_while_reading_ahead_is_raised_where_it_is_needed() -> None:
    tokens = np.zeros(81, dtype=np.uint16)
    tokens[40] = 9
    broken = TokenWindows(tokens, 8, vocab=5, origin="somewhere")
    order = sample_ids(0, 0, 10, 10).tolist()
    at = min(order.index(4), order.index(5))
    with closing(Permuted(broken, 0, 1, 1, prefetch=True)) as feed:
        for step in range(at):
            feed.fetch(step, range(1))
        with pytest.raises(UsageError, match="position 40"):
            feed.fetch(at, range(1))


def test_inputs_come_in_the_type_of_the_weights() -> None:
    images = Images(torch.rand(20, 1, 2, 2), torch.arange(20))
    (micro,) = Permuted(images, 0, 4, 4, dtype=torch.float64).fetch(0, range(1))
    assert micro.inputs.dtype == torch.float64 and micro.targets.dtype == torch.int64
    assert Permuted(DATA, 0, 4, 4, dtype=torch.float64).fetch(0, range(1))[0].inputs.dtype == torch.int64


def test_too_few_samples_is_one_clear_error() -> None:
    with pytest.raises(UsageError, match="100 training samples, one step needs 128") as caught:
        Permuted(DATA, 0, 128, 32, origin="some file")
    assert caught.value.code == "D05" and caught.value.where == "some file"
    assert len(Permuted(DATA, 0, 128, 32, repeat=True).fetch(0, range(4))) == 4


def test_an_empty_validation_set_says_so() -> None:
    empty = Permuted(TokenWindows(DATA.tokens[:20], 64), 0, 8, 8, repeat=True)
    assert empty.samples == 0 and Permuted(DATA, 0, 8, 8).samples == 100
    with pytest.raises(ValueError, match="0 samples"):
        empty.fetch(0, range(1))


def test_leaves_outside_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="do not lie"):
        Permuted(DATA, 0, 12, 4).fetch(0, range(4))
    with pytest.raises(ValueError, match="do not fill"):
        Permuted(DATA, 0, 12, 5)


def test_a_small_fetch_is_cheap() -> None:
    """Well under 0.2 ms of CPU: the best of several rounds, as other work may share its caches."""
    feed = Permuted(DATA, 0, 12, 12)
    rounds = []
    for start in range(0, 1000, 100):
        begin = time.process_time()
        for step in range(start, start + 100):
            feed.fetch(step, range(1))
        rounds.append((time.process_time() - begin) / 100)
    assert min(rounds) < 150e-6


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_a_gpu_gets_the_same_batches() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    plain = Permuted(DATA, 3, 12, 4)
    with closing(Permuted(DATA, 3, 12, 4, "cuda")) as feed:
        for step in (0, 1, 2, 7, 8, 3):
            rows = flat(feed, step)
            assert all(row.is_cuda for row in rows)
            assert all(map(torch.equal, flat(plain, step), [row.cpu() for row in rows]))
