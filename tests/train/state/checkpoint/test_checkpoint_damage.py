"""Nothing damaged is ever loaded, and the error says what is damaged and what is not."""

import hashlib
import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.state.checkpoint.cuts import make, save_all
from unisono.spec.errors import UsageError
from unisono.train.state.checkpoint import Box, latest, load, newest_whole, read_full, save, verify_folder
from unisono.train.state.checkpoint.manifest import (
    MANIFEST,
    StoredBox,
    TensorEntry,
    decode,
    encode,
    read_manifest,
)
from unisono.train.state.checkpoint.tensorfile import Damage, FileEntry

TENSORS = {"model/w": make((5, 4), torch.float32, 0), "optim/w/exp_avg": make((7,), torch.bfloat16, 1)}
RANKS = [
    [("model/w", (0, 0), (3, 4)), ("optim/w/exp_avg", (0,), (7,))],
    [("model/w", (3, 0), (2, 4))],
]


@pytest.fixture
def run_dir(tmp_path):
    for step in (100, 200, 300):
        save_all(tmp_path, step, TENSORS, RANKS, {"step": step}, token=f"t{step}")
    return tmp_path


def refused(folder):
    with pytest.raises(UsageError) as caught:
        read_full(folder)
    assert caught.value.code == "K01" and caught.value.exit == 2
    return caught.value


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00001.safetensors", MANIFEST])
def test_a_flipped_bit_in_any_byte_is_caught(tmp_path, file):
    folder = save_all(tmp_path, 1, TENSORS, RANKS, {"lr": 1e-5, "text": "é"})
    path = folder / file
    good = path.read_bytes()
    order = random.Random(0)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << order.randrange(8)
        path.write_bytes(bad)
        assert verify_folder(folder), f"byte {at}"
        with pytest.raises(UsageError):
            read_full(folder)
    path.write_bytes(good)
    assert not verify_folder(folder)


def test_a_flipped_bit_is_named_with_file_tensor_step_and_the_way_out(run_dir):
    folder = latest(run_dir)
    path = folder / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    error = refused(folder)
    assert "step-300 is damaged" in error.what
    assert "rank-00001.safetensors: model/w@3,0: its bytes fail the checksum" in error.what
    assert "resuming from step-200 is possible" in error.fix
    assert newest_whole(run_dir).name == "step-000200"
    # The part that is whole still loads: a rank verifies what it reads, and nothing else.
    load(
        folder,
        [
            Box("model/w", (5, 4), (0, 0), torch.zeros(2, 4)),
            Box("model/w", (5, 4), (4, 0), torch.zeros(0, 4)),
        ],
    )


def test_files_cut_missing_emptied_or_from_another_save(run_dir):
    steps = {step: run_dir / f"checkpoints/step-{step:06d}" for step in (100, 200, 300)}
    path = steps[300] / "rank-00000.safetensors"
    good = path.read_bytes()
    for length in (0, 7, 8, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        assert f"has {length} bytes" in refused(steps[300]).what
    path.write_bytes(good + b"\0")
    assert "bytes" in refused(steps[300]).what
    path.write_bytes(good[:-40] + bytes(40))
    assert "checksum" in refused(steps[300]).what
    path.unlink()
    assert "the file is missing" in refused(steps[300]).what
    path.symlink_to(steps[200] / path.name)
    assert "cannot be read" in refused(steps[300]).what
    path.unlink()
    path.mkdir()
    refused(steps[300])
    (steps[200] / MANIFEST).unlink()
    assert "never finished" in refused(steps[200]).what
    assert newest_whole(run_dir) == steps[100]
    (steps[100] / MANIFEST).write_bytes(b"")
    assert "no older checkpoint of this run is whole" in refused(steps[100]).fix
    assert newest_whole(run_dir) is None


def test_a_file_of_another_save_is_refused(tmp_path):
    one = save(tmp_path, 1, [Box("w", (4,), (0,), torch.zeros(4))], {})
    two = save(tmp_path, 2, [Box("w", (4,), (0,), torch.ones(4))], {})
    name = "rank-00000.safetensors"
    (two / name).write_bytes((one / name).read_bytes())
    assert "fail the checksum" in refused(two).what


def test_steps_of_an_abandoned_future_come_last(run_dir):
    (run_dir / "latest").write_text("checkpoints/step-000200\n")
    assert newest_whole(run_dir).name == "step-000200"
    for step in (100, 200):
        (run_dir / f"checkpoints/step-{step:06d}" / MANIFEST).unlink()
    assert newest_whole(run_dir).name == "step-000300"


def test_a_pointer_to_nothing_or_to_elsewhere_is_no_checkpoint(run_dir):
    for text in ("", "checkpoints/step-000999", "../../etc/passwd", "checkpoints/step-000200/.."):
        (run_dir / "latest").write_text(text)
        assert latest(run_dir) is None
    assert newest_whole(run_dir).name == "step-000300"
    assert newest_whole(run_dir / "nowhere") is None


def test_a_gap_an_overlap_or_a_lie_in_a_well_formed_manifest_is_refused(run_dir):
    folder = latest(run_dir)
    good = read_manifest(folder)
    entry = good.tensors["model/w"]
    head, tail = entry.blocks

    def refuse(expect, tensor=None, **fields):
        tensors = good.tensors | ({"model/w": tensor} if tensor else {})
        (folder / MANIFEST).write_bytes(encode(replace(good, tensors=tensors, **fields)))
        assert expect in refused(folder).what
        assert any(expect in problem for problem in verify_folder(folder))

    refuse("do not fill it", TensorEntry("F32", (5, 4), (head,)))
    refuse("overlap", TensorEntry("F32", (5, 4), (replace(head, start=(1, 0)), tail)))
    refuse("in no block", TensorEntry("F32", (6, 4), entry.blocks))
    refuse("in no block", TensorEntry("F32", (1 << 60, 4), entry.blocks))
    refuse("does not lie in", TensorEntry("F32", (4, 4), entry.blocks))
    refuse("unknown dtype", TensorEntry("F33", (5, 4), entry.blocks))
    refuse("the header has no such block", TensorEntry("I32", (5, 4), entry.blocks))
    refuse("which is not listed", TensorEntry("F32", (5, 4), (replace(head, file="../x"), tail)))
    refuse("names a file", files=good.files | {"../x": FileEntry(8, 8, "")})
    refuse("schema version 2", schema_version=2)
    huge = replace(head, shape=(1 << 40, 4), bytes=1 << 44)
    refuse("do not fill it", TensorEntry("F32", (1 << 40, 4), (huge,)))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_manifest_with_a_right_digest_does_worse_than_be_refused(data):
    """Whatever a forger writes: Damage, or a manifest whose files stay in the folder."""
    block = StoredBox("rank-00000.safetensors", "w@0", (0,), (2,), "00000000", 8)
    fields = {
        "schema_version": 1,
        "step": 1,
        "attempt": "a",
        "world": 1,
        "state": {},
        "files": {"rank-00000.safetensors": {"bytes": 16, "header_bytes": 8, "header_crc32": ""}},
        "tensors": {"w": {"dtype": "F32", "shape": [2], "blocks": [vars(block)]}},
    }
    target = data.draw(st.sampled_from([fields, fields["files"], fields["tensors"]["w"], vars(block)]))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)

    try:
        manifest = decode(forge(fields))
    except Damage:
        return
    assert all("/" not in file for file in manifest.files)


def forge(fields):
    body = json.dumps(fields).encode()[1:] + b"\n"
    return b'{"blake2b": "%s",\n' % hashlib.blake2b(body, digest_size=32).hexdigest().encode() + body
