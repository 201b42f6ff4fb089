"""What is saved under one cut of the tensors is loaded, bit for bit, under any other."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open

from tests.train.state.checkpoint.cuts import DTYPES, make, same, save_all, view, worlds
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, latest, load, read_full, save, tensor_names, verify_folder


@given(worlds())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_cut_loads_under_any_other(tmp_path_factory, case):
    tensors, (saved, wanted) = case
    run_dir = tmp_path_factory.mktemp("run")
    state = {"step": 3, "lr": 0.1 + 0.2, "big": 2**80, "text": "é", "list": [1, None, True]}
    folder = save_all(run_dir, 3, tensors, saved, state)
    assert verify_folder(folder) == [] and latest(run_dir) == folder
    for rank in wanted:
        pieces = [
            Box(n, tuple(tensors[n].shape), a, torch.zeros(s, dtype=tensors[n].dtype)) for n, a, s in rank
        ]
        assert load(folder, pieces) == state
        for piece, (n, a, s) in zip(pieces, rank, strict=True):
            assert same(piece.tensor, view(tensors[n], a, s))
    full = read_full(folder)
    # A name of which no rank holds any box is unknown; every other comes back whole.
    assert set(full) == {n for rank in saved for n, _, _ in rank} == set(tensor_names(folder))
    assert all(same(full[n], tensors[n]) for n in full)


def test_loads_into_strided_views_and_parameters(tmp_path):
    full = torch.randn(6, 8)
    folder = save(tmp_path, 1, [Box("w", (6, 8), (0, 0), full)], {})
    backing = torch.zeros(8, 12)
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    load(
        folder,
        [Box("w", (6, 8), (0, 0), backing.t()[:6, :4]), Box("w", (6, 8), (0, 4), parameter)],
    )
    assert torch.equal(backing.t()[:6, :4], full[:, :4]) and torch.equal(parameter, full[:, 4:])
    assert backing[4:].abs().sum() == 0


def test_the_safetensors_library_reads_our_files(tmp_path):
    tensors = {f"t{i}": make((3, 5), dtype, i) for i, dtype in enumerate(DTYPES)} | {"s": torch.tensor(7)}
    save(tmp_path, 1, [Box(n, tuple(t.shape), (0,) * t.dim(), t) for n, t in tensors.items()], {})
    with safe_open(tmp_path / "checkpoints/step-000001/rank-00000.safetensors", "pt") as opened:
        for name, tensor in tensors.items():
            assert same(opened.get_tensor(f"{name}@{'0,0' if tensor.dim() else ''}"), tensor)


def test_replicas_and_empty_boxes_are_not_written(tmp_path):
    full = torch.arange(4.0)
    for rank, box, saved in ((2, full, False), (1, full[4:], True), (0, full, True)):
        start = (4,) if not box.numel() else (0,)
        save(tmp_path, 1, [Box("w", (4,), start, box, saved)], {}, rank=rank, world=3, token="x", wait=False)
    folder = tmp_path / "checkpoints/step-000001"
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "rank-00000.safetensors"]


def test_nan_payloads_and_signed_zeros_survive(tmp_path):
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x7F800001, 0x00000001], dtype=torch.int64).to(torch.int32)
    folder = save(tmp_path, 1, [Box("w", (4,), (0,), bits.view(torch.float32))], {})
    assert torch.equal(read_full(folder)["w"].view(torch.int32), bits)


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Box("v", (2, 2), (0, 0), torch.zeros(2, 2)), "no tensor 'v'"),
        (Box("w", (2, 3), (0, 0), torch.zeros(2, 2)), "[2, 2] there and [2, 3] here"),
        (Box("w", (2, 2), (0, 0), torch.zeros(2, 2, dtype=torch.float64)), "F32 there and F64 here"),
    ],
)
def test_another_model_is_refused(tmp_path, piece, words):
    folder = save(tmp_path, 1, [Box("w", (2, 2), (0, 0), torch.ones(2, 2))], {})
    with pytest.raises(UsageError) as caught:
        load(folder, [piece])
    assert caught.value.code == "K03" and words in caught.value.what


def test_pieces_that_do_not_tile_are_refused_when_saved(tmp_path):
    def attempt(step, *boxes):
        pieces = [Box("w", (4,), (start,), torch.zeros(size)) for start, size in boxes]
        with pytest.raises(UsageError) as caught:
            save(tmp_path, step, pieces, {})
        assert caught.value.code == "K04" and latest(tmp_path) is None
        return caught.value.what

    assert "1 of its 4 elements" in attempt(1, (0, 2), (3, 1))
    assert "overlap" in attempt(2, (0, 3), (2, 2))


def test_bad_arguments():
    with pytest.raises(ValueError, match="does not lie"):
        Box("w", (4,), (3,), torch.zeros(2))
    with pytest.raises(ValueError, match="token"):
        save(Path("nowhere"), 1, [], {}, world=2)
    with pytest.raises(ValueError, match="JSON"):
        save(Path("nowhere"), 1, [], {"x": object()})
    with pytest.raises(ValueError, match="JSON"):
        save(Path("nowhere"), 1, [], {"x": float("nan")})
