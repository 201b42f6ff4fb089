"""The made-up log: the same samples whoever asks, rows by a power law, and something to learn."""

import numpy as np
import pytest
import torch

from unisono.config import DataConfig, ModelConfig
from unisono.models.build import build
from unisono.models.init import initialise
from unisono.spec.errors import UsageError
from unisono.spec.model import Facts
from unisono.train.data.load import load
from unisono_contrib.train.data.clicks import Clicks

MODEL = ModelConfig(kind="dlrm", d_table=8, n_dense=4, bottom=(16,), top=(16,), tables=(200, 50), lookups=2)


def test_a_sample_is_a_function_of_seed_and_number() -> None:
    log = Clicks(5, 0, 1000, 3, (40, 9), 2)
    inputs, targets = log.fetch(np.arange(1000))
    some = np.array([7, 999, 7, 0])
    again = Clicks(5, 0, 1000, 3, (40, 9), 2).fetch(some)
    assert torch.equal(again[0], inputs[some]) and torch.equal(again[1], targets[some])
    later = Clicks(5, 400, 600, 3, (40, 9), 2).fetch(np.arange(600))
    assert torch.equal(later[0], inputs[400:]) and torch.equal(later[1], targets[400:])
    assert not torch.equal(Clicks(6, 0, 1000, 3, (40, 9), 2).fetch(some)[0], inputs[some])


def test_numbers_are_normal_and_rows_follow_a_power_law() -> None:
    count, rows = 20_000, 100
    inputs, targets = Clicks(0, 0, count, 3, (rows,), 1).fetch(np.arange(count))
    numbers, chosen = inputs[:, :3].contiguous().view(torch.float64), inputs[:, 3]
    assert numbers.mean().abs() < 0.02 and (numbers.std() - 1).abs() < 0.02
    assert int(chosen.min()) == 0 and int(chosen.max()) == rows - 1
    shares = torch.bincount(chosen, minlength=rows) / count
    k = torch.arange(rows, dtype=torch.float64)
    want = ((k + 2) / (k + 1)).log() / np.log(rows + 1)
    assert (shares - want).abs().max() < 4 * np.sqrt(0.25 / count)
    assert 0.2 < targets.double().mean() < 0.7


def test_a_recommender_learns_from_it() -> None:
    """Below what the share of clicks alone would give."""
    corpus = load(DataConfig(source="clicks:samples=12000"), MODEL)
    model = build(MODEL, Facts(), "cpu")
    initialise(model, 0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step in range(120):
        inputs, targets = corpus.train.fetch(np.arange(step * 64, step * 64 + 64))
        optimizer.zero_grad()
        (model.loss(model(inputs), targets) / 64).backward()  # type: ignore[operator]
        optimizer.step()
    inputs, targets = corpus.val.fetch(np.arange(1000))
    share = targets.double().mean()
    plain = -(share * share.log() + (1 - share) * (1 - share).log())
    with torch.no_grad():
        assert model.loss(model(inputs), targets) / 1000 < 0.9 * plain  # type: ignore[operator]


def test_tables_come_from_the_data_where_the_recipe_is_silent() -> None:
    corpus = load(DataConfig(source="clicks:samples=200"), ModelConfig(kind="dlrm"))
    inputs, _ = corpus.train.fetch(np.arange(100))
    assert corpus.rows is not None and bool((inputs[:, 13:] < torch.tensor(corpus.rows)).all())
    built = build(ModelConfig(kind="dlrm"), Facts(rows=corpus.rows))
    assert [table.num_embeddings for table in built.stem.tables] == list(corpus.rows)  # type: ignore[union-attr]


def test_other_models_do_not_read_it() -> None:
    with pytest.raises(UsageError) as caught:
        load(DataConfig(source="clicks"), ModelConfig(kind="gpt"))
    assert caught.value.code == "D12"
