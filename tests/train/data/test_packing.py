"""Packed windows hold every piece of every document once, and only targets that count."""

import errno
import itertools
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.data.chats import chats, tokenizer
from tests.train.data.test_load import refused
from unisono.config import DataConfig, ModelConfig
from unisono.spec.training import IGNORED
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Permuted
from unisono.train.data.load import load
from unisono.train.data.packing import PackedWindows
from unisono.train.data.pieces import packed
from unisono.train.sample import _question

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 16), max_size=80))
def test_windows_hold_each_piece_once_and_none_too_many(sizes: list[int]):
    order, begins = packed(np.array(sizes, dtype=np.int64), 16)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    held = [sum(sizes[i] for i in order[a:b]) for a, b in itertools.pairwise(begins)]
    assert all(0 < size <= 16 for size in held)
    # Two windows that fit into one would have been one.
    assert len(held) < 2 or sum(sorted(held)[:2]) > 16


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.booleans(), st.booleans(), st.integers(0, 9))
def test_every_target_that_counts_is_there_once(lengths: list[int], several: bool, masked: bool, seed: int):
    draw, ends = np.random.default_rng(seed), np.cumsum(lengths)
    tokens = np.arange(1, ends[-1] + 1)  # each another one
    marks = draw.integers(0, 2, len(tokens), dtype=np.uint8) if masked else None
    data, _ = PackedWindows.of(tokens, ends, marks, 16, several, range(len(lengths)))
    every = np.arange(len(data))
    inputs, targets = data.fetch(every)
    firsts = np.concatenate(([0], ends[:-1]))
    wanted = sorted(set(tokens.tolist()) - set(tokens[firsts].tolist()))
    if marks is not None:
        wanted = [token for token in wanted if marks[token - 1]]
    here = targets != IGNORED
    assert sorted(targets[here].tolist()) == wanted
    assert torch.equal(inputs[here] + 1, targets[here])  # a target follows its input
    assert here.sum(1).tolist() == data.counted(every).tolist()
    ids = data.documents(every)
    assert (ids is None) is not several
    if ids is not None:
        for row, of in zip(inputs, ids, strict=True):
            for one in of.unique():
                mine = row[of == one]
                assert not mine.any() or torch.equal(mine, torch.arange(len(mine)) + mine[0])


def opened(source: str, folder: Path, model: ModelConfig | None = None, **data: object) -> Corpus:
    return load(
        DataConfig(source=source, cache=str(folder / "cache"), **data), model or ModelConfig(context=48)
    )


def test_windows_are_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = chats(tmp_path / "a.jsonl", 40)
    made = opened(source, tmp_path, val_fraction=0.2)
    other = opened(source, tmp_path, ModelConfig(context=32))
    assert len(list((tmp_path / "cache").glob("windows-*/order"))) == 4

    def again(*_: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr("unisono.train.data.pieces.packed", again)
    mapped = opened(source, tmp_path, val_fraction=0.2)
    assert isinstance(mapped.train, PackedWindows) and isinstance(mapped.train.order, np.memmap)
    for ours, theirs in ((mapped.train, made.train), (mapped.val, made.val)):
        assert isinstance(ours, PackedWindows) and isinstance(theirs, PackedWindows)
        every = np.arange(len(theirs))
        assert len(ours) == len(theirs) > 0
        assert all(torch.equal(a, b) for a, b in zip(ours.fetch(every), theirs.fetch(every), strict=True))
        ids, others = ours.documents(every), theirs.documents(every)
        assert ids is not None and others is not None and torch.equal(ids, others)
        assert ours.counted(every).tolist() == theirs.counted(every).tolist()
    assert mapped.notes == made.notes and mapped.fingerprint == made.fingerprint == other.fingerprint
    with pytest.raises(AssertionError, match="packed again"):
        opened(source, tmp_path, ModelConfig(context=40))


def test_a_cache_that_takes_no_windows_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that others filled with the tokens, and that is read-only here."""
    source = chats(tmp_path / "a.jsonl", 40)
    want = opened(source, tmp_path).train
    for path in (tmp_path / "cache").glob("windows-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    rename = Path.rename

    def refused_there(self: Path, target: Path) -> Path:
        if target.name.startswith("windows-"):
            raise OSError(errno.EROFS, "Read-only file system")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused_there)
    found = opened(source, tmp_path).train
    assert not list((tmp_path / "cache").glob("windows-*/sums"))
    assert isinstance(found, PackedWindows) and isinstance(want, PackedWindows)
    assert not isinstance(found.order, np.memmap) and found.order.tolist() == want.order.tolist()


def test_chats_are_packed_and_texts_are_a_stream(tmp_path: Path):
    source = chats(tmp_path / "a.jsonl", 40)
    corpus = opened(source, tmp_path)
    assert isinstance(corpus.train, PackedWindows) and corpus.train.several
    assert "36 documents lie in" in corpus.notes[0]
    padded = opened(source, tmp_path, packing="none")
    assert isinstance(padded.train, PackedWindows) and len(padded.train) >= 36 > len(corpus.train)
    assert padded.train.documents(np.arange(2)) is None
    stream = opened(source, tmp_path, answers_only=False)
    assert not isinstance(stream.train, PackedWindows) and stream.vocab == 256
    assert stream.decode is not None and "user: w" in stream.decode(
        stream.train.fetch(np.arange(1))[0][0].tolist()
    )


def test_a_folder_without_a_template_is_told(tmp_path: Path):
    pytest.importorskip("tokenizers")
    source = chats(tmp_path / "a.jsonl", 40)
    bare = opened(source, tmp_path, tokenizer=tokenizer(tmp_path / "bare", template=""))
    assert any("no chat template" in line for line in bare.notes)
    assert not any("template" in line for line in opened(source, tmp_path).notes)


def test_what_ends_a_run_on_chats_begins_with_a_question_that_is_held_out(tmp_path: Path):
    corpus = opened(chats(tmp_path / "a.jsonl", 40), tmp_path)
    asked = _question(corpus)
    assert asked is not None and corpus.decode is not None
    assert re.fullmatch(r"user: w+\nassistant: ", corpus.decode(asked[0]))
    inputs, targets = corpus.val.fetch(np.arange(1))
    held = targets[0][targets[0] != IGNORED].tolist()
    assert asked[1] in held and inputs[0, : len(asked[0])].tolist() == asked[0]
    assert _question(opened(chats(tmp_path / "a.jsonl", 40), tmp_path, answers_only=False)) is None


def test_what_does_not_go_together_is_refused(tmp_path: Path):
    source, own = chats(tmp_path / "a.jsonl", 40), ModelConfig(kind="mine.py:model", context=48)
    refused("D17", lambda: opened(source, tmp_path, packing="stream"))
    refused("D17", lambda: opened(source, tmp_path, own, packing="documents"))
    auto = opened(source, tmp_path, own).train
    assert isinstance(auto, PackedWindows) and not auto.several  # any causal model may have it
    refused("D08", lambda: opened(source, tmp_path, ModelConfig(context=48, vocab=100)))
    refused("D11", lambda: opened(source, tmp_path, tokenizer="words"))


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_leaves_say_what_share_of_the_global_batch_counts(tmp_path: Path, micro_batch: int):
    corpus = opened(chats(tmp_path / "a.jsonl", 60), tmp_path)
    feed = Permuted(corpus.train, 3, 4, micro_batch)
    for step in range(5):
        leaves = feed.fetch(step, range(4 // micro_batch))
        counted = sum(int((leaf.targets != IGNORED).sum()) for leaf in leaves)
        assert {leaf.scale for leaf in leaves} == {4 * 48 / counted}
        some = feed.fetch(step, range(1))
        assert some[0].scale == leaves[0].scale and some[0].documents is not None
        assert torch.equal(some[0].documents, leaves[0].documents)
