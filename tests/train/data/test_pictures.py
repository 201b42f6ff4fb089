"""Pictures of a folder are decoded once, in the model's size, under the number of their class."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.data.test_load import refused
from unisono.config import DataConfig, ModelConfig
from unisono.train.data.dataset import Corpus
from unisono.train.data.load import load

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.timeout(120)


def made(folder: Path, each: int = 10) -> Path:
    """Red cats and blue dogs, wider than high."""
    for name, colour in (("cats", (255, 0, 0)), ("dogs", (0, 0, 255))):
        (folder / "pics" / name / "more").mkdir(parents=True)
        for i in range(each):
            Image.new("RGB", (40 + i, 20), colour).save(
                folder / "pics" / name / ("more" if i % 2 else ".") / f"{i}.png"
            )
    return folder / "pics"


def opened(pics: Path, folder: Path, model: ModelConfig, **data: object) -> Corpus:
    return load(DataConfig(source=f"images:{pics}", cache=str(folder / "cache"), workers=2, **data), model)


def test_each_picture_is_there_once_in_the_models_size(tmp_path: Path):
    pics = made(tmp_path)
    corpus = opened(pics, tmp_path, ModelConfig(kind="convnet", image=(3, 8, 12)), val_fraction=0.25)
    assert (len(corpus.train), len(corpus.val), corpus.classes) == (15, 5, 2) and corpus.sample_shape == (
        3,
        8,
        12,
    )
    sides = [part.fetch(np.arange(len(part))) for part in (corpus.train, corpus.val)]
    inputs, targets = (torch.cat(side) for side in zip(*sides, strict=True))
    assert (
        inputs.shape == (20, 3, 8, 12) and inputs.dtype == torch.float32 and targets.tolist().count(1) == 10
    )
    assert (inputs[targets == 0][:, 0] == 1).all() and (inputs[targets == 1][:, 2] == 1).all()
    grey = opened(pics, tmp_path, ModelConfig(kind="mlp", image=(1, 4, 4)))
    assert grey.sample_shape == (1, 4, 4) and 0 < float(grey.train.fetch(np.arange(1))[0].max()) < 1
    free = opened(pics, tmp_path, ModelConfig(kind="mlp"))
    assert free.sample_shape == (3, 64, 64)
    assert len([one for one in (tmp_path / "cache").iterdir() if one.is_dir()]) == 3
    assert opened(pics, tmp_path, ModelConfig(kind="mlp")).fingerprint == free.fingerprint


def test_mistakes_with_pictures(tmp_path: Path):
    model, pics = ModelConfig(kind="mlp"), made(tmp_path, 3)
    (pics / "cats" / "broken.png").write_text("no picture")
    assert "broken.png" in refused("D14", lambda: opened(pics, tmp_path, model)).where
    corpus = opened(pics, tmp_path, model, skip_bad=True)
    assert len(corpus.train) + len(corpus.val) == 6 and "1 pictures" in corpus.notes[0]
    targets = [part.fetch(np.arange(len(part)))[1] for part in (corpus.train, corpus.val)]
    assert torch.cat(targets).bincount().tolist() == [3, 3]
    refused("D04", lambda: opened(pics / "cats" / "more", tmp_path, model))
    refused("D02", lambda: opened(tmp_path / "none", tmp_path, model))
    refused("D12", lambda: opened(pics, tmp_path, ModelConfig()))


def test_whatever_lies_there_in_the_place_of_a_picture_is_named_or_left_out(tmp_path: Path) -> None:
    pics, model = made(tmp_path, 3), ModelConfig(kind="mlp")
    cats, whole = pics / "cats", (pics / "cats" / "0.png").read_bytes()
    bodies = {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "zeros": bytes(200),
        "text": b"<svg/>",
        "gzip": b"\x1f\x8b\x08",
    }
    for name, body in bodies.items():
        (cats / f"{name}.png").write_bytes(body)
    (cats / "link.png").symlink_to("nowhere")
    (cats / "round.png").symlink_to("round.png")
    os.mkfifo(cats / "pipe.png")
    (cats / "folder.png").mkdir()
    (cats / "huge.png").write_bytes(whole[:16] + (60_000).to_bytes(4, "big") * 2 + whole[24:])
    assert refused("D14", lambda: opened(pics, tmp_path, model)).where == str(cats / "cut.png")
    corpus = opened(pics, tmp_path, model, skip_bad=True)
    assert len(corpus.train) + len(corpus.val) == 6 and corpus.notes[0].startswith("9 pictures")
