"""Every source gives numbered samples; every mistake gives one error with path and remedy."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from unisono.spec.errors import UsageError
from unisono.train.data.dataset import Corpus
from unisono.train.data.documents import stdlib
from unisono.train.data.words import files

Open = Callable[..., Corpus]


def refused(code: str, call: Callable[[], object]) -> UsageError:
    with pytest.raises(UsageError) as caught:
        call()
    error = caught.value
    assert error.code == code and error.exit == 2
    assert error.fix and error.where, "each error names a place and a remedy"
    return error


# --- text ---------------------------------------------------------------------------------------------------


def test_stdlib_is_large_stable_and_without_tests(open_source: Open) -> None:
    names = [name for name, _ in stdlib()]
    assert len(names) > 300
    assert not any(
        "site-packages" in name or "/test" in name.lower().rpartition("/lib/")[2] for name in names
    )
    first, again = open_source("stdlib", context=64), open_source("stdlib", context=64)
    assert first.fingerprint == again.fingerprint
    assert first.vocab == 256 and len(first.train) * 64 > 5_000_000
    assert first.decode is not None
    assert "import" in first.decode(first.train.fetch(np.arange(40))[0].reshape(-1).tolist())


def test_bytes_of_a_file(open_source: Open, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(100)))
    corpus = open_source(f"text:{file}")
    assert (len(corpus.train), len(corpus.val)) == (11, 1)  # 90 and 10 bytes, windows of 8 and one more
    inputs, targets = corpus.train.fetch(np.array([10, 0]))
    assert inputs.tolist() == [list(range(80, 88)), list(range(8))]
    assert torch.equal(targets, inputs + 1) and inputs.dtype == torch.int64 and inputs.is_contiguous()
    assert corpus.val.fetch(np.array([0]))[0].tolist() == [list(range(90, 98))]
    assert corpus.sample_shape == (8,) and corpus.classes == 256


def test_characters_are_numbered_in_sorted_order(open_source: Open, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("zebra äöü € 😀 " * 20, encoding="utf-8")
    corpus = open_source(f"text:{file}", tokenizer="char")
    letters = sorted(set("zebra äöü € 😀 "))
    assert corpus.vocab == len(letters)
    assert corpus.encode is not None and corpus.decode is not None
    assert corpus.encode("a€😀") == [letters.index(c) for c in "a€😀"]
    assert corpus.decode(corpus.encode("zebra äöü")) == "zebra äöü"
    assert corpus.decode(corpus.train.fetch(np.array([0]))[0][0].tolist()) == "zebra äö"
    with pytest.raises(UsageError, match="'Q' does not occur"):
        corpus.encode("Q")


def test_byte_text_survives_the_round_trip(open_source: Open, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("äöü € " * 20, encoding="utf-8")
    corpus = open_source(f"text:{tmp_path / 'a.txt'}")
    assert corpus.encode is not None and corpus.decode is not None
    assert corpus.decode(corpus.encode("ä € x")) == "ä € x"


def test_a_folder_is_its_files_in_order(open_source: Open, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, body in (("b.txt", "B" * 8), ("a.txt", "A" * 8), ("sub/c.txt", "C" * 8), (".hidden", "H" * 8)):
        (tmp_path / name).write_text(body)
    corpus = open_source(f"text:{tmp_path}", val_fraction=0.0, context=4)
    tokens = bytes(corpus.train.fetch(np.arange(6))[0].reshape(-1).tolist())
    assert tokens == b"A" * 8 + b"\0" + b"B" * 8 + b"\0" + b"C" * 6
    assert len(corpus.val) == 0


def test_a_pattern_is_its_files(open_source: Open, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 20)
    (tmp_path / "c.md").write_text("c" * 20)
    corpus = open_source(f"text:{tmp_path}/*.txt", val_fraction=0.0, context=4)
    tokens = bytes(corpus.train.fetch(np.arange(len(corpus.train)))[0].reshape(-1).tolist())
    assert tokens == b"a" * 20 + b"\0" + b"b" * 19
    refused("D02", lambda: open_source(f"text:{tmp_path}/*.rst"))


def test_mistakes_with_text(open_source: Open, tmp_path: Path) -> None:
    empty, short, image = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "image.png"
    empty.touch()
    short.write_text("12345678")
    image.write_bytes(b"\x89PNG" + bytes(200))
    folder = tmp_path / "folder"
    folder.mkdir()
    missing = refused("D02", lambda: open_source(f"text:{tmp_path / 'nothing' / 'here.txt'}"))
    assert "here.txt" in missing.what and "does not exist either" in missing.likely
    refused("C06", lambda: open_source("text:"))
    assert "empty.txt" in refused("D04", lambda: open_source(f"text:{empty}")).where
    refused("D04", lambda: open_source(f"text:{folder}"))
    refused("D05", lambda: open_source(f"text:{short}", val_fraction=0.0))
    binary = refused("D06", lambda: open_source(f"text:{image}", tokenizer="char"))
    assert "0x89 at offset 0" in binary.what and "image.png" in binary.where


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(open_source: Open, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("x" * 100)
    secret.chmod(0)
    refused("D03", lambda: open_source(f"text:{secret}"))


def test_system_errors_become_ours(
    open_source: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 100)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "Permission denied" in refused("D03", lambda: open_source(f"text:{file}")).what


# --- images -------------------------------------------------------------------------------------------------


def test_digits(open_source: Open) -> None:
    corpus = open_source("digits", kind="convnet")
    assert len(corpus.train) + len(corpus.val) == 1797 and len(corpus.val) == 179
    inputs, targets = corpus.train.fetch(np.array([5, 5, 7]))
    assert inputs.shape == (3, 1, 8, 8) and inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert torch.equal(inputs[0], inputs[1])
    every, classes = corpus.train.fetch(np.arange(len(corpus.train)))
    assert every.min() == 0.0 and every.max() == 1.0
    assert set(classes.tolist()) == set(range(10)) == set(corpus.val.fetch(np.arange(179))[1].tolist())
    assert corpus.vocab is None and corpus.classes == 10 and corpus.sample_shape == (1, 8, 8)


def test_digits_are_scikit_learns(open_source: Open) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    theirs = datasets.load_digits()
    corpus = open_source("digits", kind="mlp", val_fraction=0.0)
    inputs, targets = corpus.train.fetch(np.arange(1797))
    ours = np.c_[inputs.reshape(1797, 64).numpy() * 16, targets.numpy()]
    both = [a[np.lexsort(a.T)] for a in (ours, np.c_[theirs.data, theirs.target])]
    assert np.array_equal(*both)


def test_digits_without_scikit_learn(open_source: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono_contrib.train.data.digits.find_spec", lambda name: None)
    assert "pip install 'unisono[digits]'" in refused("D10", lambda: open_source("digits", kind="mlp")).fix


# --- choice -------------------------------------------------------------------------------------------------


def test_mistakes_of_choice(open_source: Open, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    assert "did you mean stdlib?" in refused("C06", lambda: open_source("stdlbi")).what
    refused("D11", lambda: open_source(f"text:{tmp_path / 'a.txt'}", tokenizer="hf:gpt2"))
    refused("D12", lambda: open_source("digits"))
    refused("D12", lambda: open_source("stdlib", kind="mlp"))
    refused("D08", lambda: open_source(f"text:{tmp_path / 'a.txt'}", vocab=100))
    assert open_source(f"text:{tmp_path / 'a.txt'}", vocab=300).vocab == 256


def test_a_folder_beside_the_current_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is hidden; what is hidden in it is not."""
    for name in (".data/a.jsonl", ".data/in/b.jsonl", ".data/.c.jsonl", ".data/.git/d.jsonl", "here/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    assert files("../.data", [".jsonl"]) == ["../.data/a.jsonl", "../.data/in/b.jsonl"]
