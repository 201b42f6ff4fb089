import gzip
import json
from pathlib import Path

import pytest

from unisono.observe import environment, memory, trace
from unisono.observe.files import filled, write_whole
from unisono.observe.metrics import JsonLines, read_lines
from unisono.observe.span import Recorder, Span


def test_lines_are_readable_while_the_file_is_open(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write({"step": 0, "loss": 5.5})
        assert read_lines(path) == ([{"step": 0, "loss": 5.5}], 0)
        lines.write({"step": 1, "loss": float("nan"), "time": {"data": float("inf")}})
    assert read_lines(path)[0][1] == {"step": 1, "loss": None, "time": {"data": None}}


def test_a_half_written_line_spoils_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0}\n{"step":1,"lo')
    with JsonLines(path) as lines:
        lines.write({"step": 2})
    assert read_lines(path) == ([{"step": 0}, {"step": 2}], 1)


def test_lines_that_are_no_objects_or_no_text_count_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":0}\n[1]\n\xff\xfe{}\n\n')
    assert read_lines(path) == ([{"step": 0}], 2)


def test_a_trace_comes_back_as_it_went(tmp_path: Path) -> None:
    recorder = Recorder(rank=1)
    recorder.keep = True
    with recorder.span("backward", micro=2, stage=1):
        recorder.add(
            "comm", recorder._clock() - 5000, recorder._clock(), axis="dp", op="all_reduce", exposed=False
        )
    spans = recorder.take()
    path = trace.write(tmp_path / "rank1.json.gz", spans, 1, 4, epoch_ns=recorder.epoch_ns, coords={"pp": 1})
    back = trace.read(path)
    assert (back.rank, back.world) == (1, 4)
    assert [(s.kind, s.tags) for s in back.spans] == [(s.kind, s.tags) for s in spans]
    for read, written in zip(back.spans, spans, strict=True):
        assert abs(read.start_ns - written.start_ns - recorder.epoch_ns) <= 1000
        assert abs((read.stop_ns - read.start_ns) - (written.stop_ns - written.start_ns)) <= 1000


def test_a_trace_is_what_viewers_expect(tmp_path: Path) -> None:
    import gzip

    spans = [
        Span("forward", 1000, 3000, {"micro": 0}),
        Span("comm", 0, 9000, {"exposed": False, "op": "send"}),
    ]
    path = trace.write(tmp_path / "rank2.json.gz", spans, 2, 4, host="box", coords={"dp": 1, "pp": 0})
    document = json.loads(gzip.decompress(path.read_bytes()))
    assert document["distributedInfo"]["rank"] == 2
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"], e["pid"], e["tid"]) for e in events] == [(1.0, 2.0, 2, 0), (0.0, 9.0, 2, 1)]
    names = {e["args"].get("name") for e in document["traceEvents"] if e["ph"] == "M"}
    assert "rank 2 (dp=1 pp=0)" in names


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08 cut", b"plain text"])
def test_a_broken_trace_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(content)
    with pytest.raises((OSError, EOFError, ValueError)):
        trace.read(path)


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "a" / "b.txt", "one")
    write_whole(path, b"two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_memory_is_plausible() -> None:
    assert 5 < memory.rss_mib() <= memory.peak_rss_mib() * 1.01 < 1e6


def test_the_environment_is_json_and_keeps_secrets(tmp_path: Path) -> None:
    environ = {"OMP_NUM_THREADS": "2", "UNISONO_TOKEN": "hush", "HOME": "/root", "RANK": "0"}
    path = environment.write(tmp_path / "env.json", environ, folder=tmp_path)
    found = json.loads(path.read_text())
    assert found["env"] == {"OMP_NUM_THREADS": "2", "RANK": "0"}
    assert found["git"] is None
    assert found["packages"]["torch"]
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert found["cpu"]


@pytest.mark.parametrize("name", ["both.json", "both.json.gz"])
def test_recordings_stand_side_by_side_in_one_trace(tmp_path: Path, name: str) -> None:
    span = Span("forward", 1_000, 3_000, {"micro": 2, "stage": 0})
    later = Span("backward", 5_000, 9_000, {"micro": 2, "stage": 0})
    groups = {
        "simulated": [trace.TraceLane("rank 0", [span]), trace.TraceLane("rank 1", [later])],
        "measured": [trace.TraceLane("rank 0", [span, later])],
    }
    content = trace.write_groups(tmp_path / name, groups).read_bytes()
    document = json.loads(gzip.decompress(content) if name.endswith(".gz") else content)
    events = document["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "simulated rank 0", 2: "simulated rank 1", 3: "measured rank 0"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(order, key=lambda pid: order[pid]) == [1, 2, 3]
    drawn = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn == [
        (1, "forward 2", 1.0, 2.0),
        (2, "backward 2", 5.0, 4.0),
        (3, "forward 2", 1.0, 2.0),
        (3, "backward 2", 5.0, 4.0),
    ]


def test_a_folder_is_filled_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with pytest.raises(OSError, match="full"), filled(out) as aside:
        (aside / "one").write_text("half")
        raise OSError("full")
    assert not (tmp_path / "deep").exists()
    with filled(out) as aside:
        (aside / "one").write_text("1")
        assert list(out.glob("o*")) == []
    with pytest.raises(ZeroDivisionError), filled(out, ["*"]) as aside:
        (aside / "one").write_text("2")
        (aside / "two").write_text("2")
        raise ZeroDivisionError
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("one", "1")]
    with filled(out, ["o*"]) as aside:
        (aside / "two").write_text("2")
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("two", "2")]
