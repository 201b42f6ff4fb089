"""A mixture has its shares at every thousand, and each of its sources in an order of its own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.data.chats import chats
from tests.train.data.test_load import refused
from unisono.config import DataConfig, ModelConfig
from unisono.spec.training import IGNORED
from unisono.train.data.blend import BLOCK, Blend, shared_out
from unisono.train.data.dataset import Images
from unisono.train.data.feed import Permuted
from unisono.train.data.load import load


def numbered(first: int, count: int) -> Images:
    """Samples that are their numbers."""
    return Images(torch.arange(first, first + count).float()[:, None], torch.arange(first, first + count))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
def test_shares_are_whole_and_of_a_thousand(weights: list[float]):
    counts = shared_out(weights)
    assert sum(counts) == BLOCK and min(counts) >= 1
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - BLOCK * weight / sum(weights)) <= len(weights)
    assert shared_out([2, 1]) == [667, 333] and shared_out([0.7, 0.3]) == [700, 300]


@pytest.mark.parametrize("seed", [0, 5])
def test_each_source_comes_once_before_it_comes_again(seed: int):
    parts = [numbered(0, 130), numbered(1000, 400), numbered(5000, 7)]
    blend = Blend(parts, shared_out([5, 4, 1]))
    ids = blend.fetch(blend.numbers_at(seed, np.arange(3000)))[1].numpy()
    for low, size, share in ((0, 130, 500), (1000, 400, 400), (5000, 7, 100)):
        mine = ids[(ids >= low) & (ids < low + size)]
        assert len(mine) == 3 * share
        for first in range(0, len(mine) - size + 1, size):
            assert sorted(mine[first : first + size]) == list(range(low, low + size))
        for thousand in ids.reshape(3, BLOCK):
            assert ((thousand >= low) & (thousand < low + size)).sum() == share
    assert blend.shares(seed, 2345) == [
        int(((ids[:2345] >= low) & (ids[:2345] < low + 900)).sum()) for low in (0, 1000, 5000)
    ]
    other = blend.fetch(blend.numbers_at(seed + 1, np.arange(3000)))[1].numpy()
    assert (ids != other).mean() > 0.5


def test_any_rank_may_ask_for_any_leaf():
    feed = Permuted(Blend([numbered(0, 30), numbered(100, 50)], [600, 400]), 3, 12, 2)
    whole = torch.cat([leaf.targets for leaf in feed.fetch(40, range(6))])
    assert torch.equal(feed.fetch(40, range(3, 4))[0].targets, whole[6:8])


def test_texts_and_chats_together(tmp_path: Path):
    (tmp_path / "a.txt").write_text("to be or not to be " * 100)
    source = f"mixture:3*text:{tmp_path / 'a.txt'} + {chats(tmp_path / 'a.jsonl', 60)}"
    data = DataConfig(source=source, cache=str(tmp_path / "cache"))
    corpus = load(data, ModelConfig(context=48))
    assert "of every 1000 samples, 750 of text:" in corpus.notes[-1] and len(corpus.val) > 0
    (leaf,) = Permuted(corpus.train, 0, 16, 16).fetch(0, range(1))
    assert leaf.documents is not None and leaf.scale == 16 * 48 / int((leaf.targets != IGNORED).sum())
    whole = (leaf.targets != IGNORED).all(1)
    assert whole.any() and not whole.all() and not leaf.documents[whole].any()
    assert corpus.shares is not None and sum(corpus.shares(0, 16).values()) == 16
    refused("D11", lambda: load(data.model_copy(update={"tokenizer": "char"}), ModelConfig(context=48)))
    refused("C06", lambda: load(DataConfig(source="mixture:0*stdlib"), ModelConfig(context=48)))
    refused("D12", lambda: load(DataConfig(source="mixture:digits + stdlib"), ModelConfig(kind="mine.py:m")))


def test_sources_and_thousands_have_orders_of_their_own():
    """Sources of one length do not come in step, and who comes when is drawn for each thousand."""
    ids = Blend([numbered(0, 300), numbered(1000, 300)], [500, 500]).numbers_at(3, np.arange(3 * BLOCK))
    one, other = ids[ids < 300][:300], ids[ids >= 300][:300] - 300
    assert (one != other).mean() > 0.9
    owners = (ids >= 300).reshape(3, BLOCK)
    assert all(0.4 < (owners[a] != owners[b]).mean() < 0.6 for a, b in ((0, 1), (0, 2), (1, 2)))
