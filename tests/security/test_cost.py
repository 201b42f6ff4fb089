"""What a hostile file costs follows its length: few bytes that ask for much, again and again, are refused at once."""

import gzip
import io
import json
import os
import pickle
import random
import resource
import signal
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.security.harm import STORAGE, again_and_again, good_file, nested
from tests.security.weights import dcp
from unisono.observe import trace
from unisono.observe.metrics import read_lines
from unisono.report.collect import collect
from unisono.spec.doubtful import parse
from unisono.spec.errors import UsageError
from unisono.train.data.tokenised.chats import BadRecord
from unisono.train.data.tokenised.records import parsed
from unisono.train.foreign import open_weights
from unisono.train.state.checkpoint.boxes import tiling_fault
from unisono_contrib.train.foreign import inert
from unisono_contrib.train.foreign.inert import plain_pickle, saved, tensors_in
from unisono_contrib.train.foreign.machine import simple

pytestmark = pytest.mark.timeout(120)
A = 2_000_000
"""Letters of something long."""


class _TooMuch(BaseException):
    pass


@contextmanager
def bounded(seconds: float = 3.0, room: int = 1 << 30) -> Iterator[None]:
    """Fails for what takes more seconds of a core, or more bytes."""

    def over(*_: object) -> None:
        raise _TooMuch

    before, limits = signal.signal(signal.SIGPROF, over), resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + room, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except _TooMuch:
        pytest.fail(f"more than {seconds} s of a core")
    except MemoryError:
        pytest.fail(f"more than {room >> 20} MiB")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def text(value: str) -> bytes:
    return pickle.dumps(value, 2)[2:-3]  # without its place in the memo


def file_of(path: Path, program: bytes) -> Path:
    """A file of `torch.save` with that program as its pickle."""
    _, parts = good_file()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, b"\x80\x02" + program + b"." if name.endswith("data.pkl") else data)
    return path


def tuples(wide: int, deep: int) -> bytes:
    """A tuple of tuples, each of them there `wide` times."""
    levels = (b"(" + (b"h" + bytes([i])) * wide + b"tq" + bytes([i + 1]) + b"0" for i in range(deep))
    return b"Nq\x000" + b"".join(levels) + b"h" + bytes([deep])


LONG = text("k" * A) + b"q\x000"
AGAIN = {
    "a tuple as a key": b"}" + tuples(63, 7) + b"Ns",
    "tuples in a set": b"\x8f(" + tuples(63, 7) + b"\x90",
    "tuples in a frozenset": b"cbuiltins\nfrozenset\n(" + tuples(63, 7) + b"l\x85R",
    "tuples of an ordered dictionary": b"ccollections\nOrderedDict\n(" + tuples(63, 7) + b"N\x86l\x85R",
    "keys alike": LONG + b"}" + text("k" * A) + b"Ns" + b"h\x00Ns" * 60_000,
    "one long number": b"}" + text("9" * A) + b"q\x000" + b"cbuiltins\nfloat\nq\x010" + b"h\x01h\x00\x85R0" * 9_000,
    "one long call": b"(" + b"N" * A + b"tq\x000" + b"cmade\nup\nq\x010" + b"(" + b"h\x01h\x00R" * 2_000 + b"l",
    "names alike": LONG + text("k" * A) + b"q\x010" + b"}h\x00h\x00\x930" + b"h\x01h\x01\x930" * 60_000,
}  # fmt: skip


@pytest.mark.parametrize("program", AGAIN.values(), ids=list(AGAIN))
def test_few_bytes_of_a_pickle_that_ask_for_much(tmp_path: Path, program: bytes) -> None:
    with bounded(), pytest.raises(UsageError):
        open_weights(file_of(tmp_path / "x.pt", program))


def test_tuples_of_one_hash_as_keys_are_told_apart(tmp_path: Path) -> None:
    """Of pairs of numbers as many as one likes have the same hash, for it is no secret."""
    alike = colliding(60)
    keys = b"".join(pickle.dumps(pair, 2)[2:-1].partition(b"q\x00")[0] + b"N" for pair in alike)
    (tmp_path / "x").write_bytes(b"\x80\x02}(" + keys + b"u.")
    found = plain_pickle(tmp_path / "x")
    assert len({hash(key) for key in found}) == len(found) == len(alike)


def colliding(count: int) -> list[tuple[int, ...]]:
    """Tuples of small numbers of the same hash."""
    mask, one, two, five = (1 << 64) - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    undo = pow(two, -1, 1 << 64), pow(one, -1, 1 << 64)
    found, first = list[tuple[int, ...]](), 0
    while len(found) < count:
        first += 1
        lane = (five + first * two) & mask
        lane = ((lane << 31 | lane >> 33) & mask) * one & mask
        # The second number that leads from here to one fixed place.
        goal = 12345 * undo[1] & mask
        goal = (goal >> 31 | goal << 33) & mask
        second = (goal - lane) * undo[0] & mask
        if second < 1 << 53:
            found.append((first, second))
    assert len({hash(pair) for pair in found}) == 1
    return found


@pytest.mark.parametrize("draw", [nested, again_and_again])
def test_what_the_fuzzer_draws_of_these(tmp_path: Path, draw: Any) -> None:
    for number in range(12):
        with bounded():
            try:
                open_weights(file_of(tmp_path / "x.pt", draw(random.Random(number))))
            except UsageError:
                continue


def test_a_tensor_that_lies_askew_is_copied_once(tmp_path: Path) -> None:
    """Each reference to its numbers, three bytes, was a copy of all of them."""
    _, parts = good_file()
    pid = STORAGE[:-1]
    program = b"(" + pid + b"q\x00Q" + b"h\x00Q" * 3_000 + b"l"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in parts.items():
            data = bytes(4 << 20) if name.endswith("data/0") else data
            archive.writestr(name, b"\x80\x02" + program + b"." if name.endswith("data.pkl") else data)
    for shift in range(4):
        (tmp_path / "x.pt").write_bytes(bytes(shift) + out.getvalue())
        with bounded():
            assert len(saved(tmp_path / "x.pt", shift)) == 3_001


def test_dictionaries_in_each_other_have_names_of_some_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inert, "_LETTERS", 1 << 17)
    chain: dict[str, Any] = {"k": torch.ones(1)}
    for _ in range(10_000):
        chain = {"k": chain}
    shared: dict[int, Any] = dict.fromkeys(range(10_000))
    wide = {str(i): shared for i in range(10_000)}
    for tree in (chain, wide):
        with bounded(), pytest.raises(ValueError, match="without end"):
            tensors_in(tree)
    with pytest.raises(ValueError, match="no name"):
        tensors_in({simple((1, 2)): torch.ones(1)})


def test_a_place_is_named_by_one_chunk_of_dcp(tmp_path: Path) -> None:
    """A list of chunks that many tensors share, or a file that each chunk reads whole."""
    metadata, data = dcp()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(metadata)
    (tmp_path / "dcp/__0_0.distcp").write_bytes(data)
    assert open_weights(tmp_path / "dcp").shapes == {"model.a": (2, 3)}
    (tmp_path / "dcp/__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(UsageError, match="more bytes than it has"):
        open_weights(tmp_path / "dcp")


def test_a_weight_of_zero_is_dealt_once(tmp_path: Path) -> None:
    shapes = {f"w{i}": (1,) for i in range(2_000)}
    about = {"module": {}, "param_shapes": [shapes] * 20_000}
    for stage, parts in ((1, {"single_partition_of_fp32_groups": [torch.ones(9)]}),
                         (3, {"fp32_flat_groups": [torch.ones(1 << 18)] * 20_000})):  # fmt: skip
        folder = tmp_path / f"zero{stage}"
        folder.mkdir()
        torch.save(about, folder / "mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": {"zero_stage": stage, **parts}},
                   folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")  # fmt: skip
        with bounded(), pytest.raises(UsageError):
            open_weights(folder)


def safetensors(path: Path, header: dict[str, Any] | bytes, room: int = 64) -> Path:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(room))
    return path


def test_headers_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    long = [int("9" * 4000)] * 1_000
    twice = b"{" + b",".join(b'"%d":0' % i for i in range(60_000)) + b',"59999":1}'
    same = {f"w{i}": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]} for i in range(2)}
    for header in ({"w": {"dtype": "U8", "shape": long, "data_offsets": [0, 8]}}, twice, same, b"[" * 10**6):
        with bounded(), pytest.raises(UsageError):
            open_weights(safetensors(path, header))
    with bounded(), pytest.raises(ValueError, match="'59999' is given twice"):
        parse(twice)


def test_boxes_that_tile_a_tensor_in_many_dims_are_told_apart() -> None:
    """Pairs of them would be two thousand million."""
    dims = 16
    boxes = [(tuple(i >> d & 1 for d in range(dims)), (1,) * dims) for i in range(1 << 14)]
    with bounded():
        assert tiling_fault((2,) * 14 + (1, 1), boxes) == ""
    assert "overlap" in tiling_fault((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))])
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert tiling_fault((3, 3), pinwheel) == "", "no cut goes right through"


def test_a_run_folder_of_others_is_read_in_no_time(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace/rank0.json.gz").write_bytes(gzip.compress(b" " * (64 << 20), 1))
    (tmp_path / "config.resolved.toml").write_text("a." * 40_000 + "a = 1")
    (tmp_path / "history.jsonl").write_text("[" * 100_000)
    for name in ("summary.json", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    with bounded(6.0):
        record = collect(tmp_path)
    said = "\n".join(record.missing)
    assert "times its own bytes" in said and "too many parts" in said and "no regular file" in said
    with pytest.raises(OSError, match="no regular file"):
        read_lines(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="times its own"):
        trace.read(tmp_path / "trace/rank0.json.gz")


def test_a_record_with_a_key_twice_among_many_is_told() -> None:
    line = b"{" + b",".join(b'"%d":0' % i for i in range(60_000)) + b',"59999":1}'
    with bounded(), pytest.raises(BadRecord, match="59999"):
        parsed(line)
