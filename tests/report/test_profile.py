"""A run's profile: Perfetto's own classes read the trace, and what it says is what the report says."""

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.verbs import jobs
from unisono.report import page
from unisono_contrib.report.profile.digest import digest
from unisono_contrib.report.profile.kineto import read
from unisono_contrib.report.profile.pieces import innermost, lanes, union_ns
from unisono_contrib.report.profile.track_events import varint

pytestmark = pytest.mark.timeout(300)

PLAN = "dp=2 pp=2 micros=2"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks whose steps 6 and 7 were profiled."""
    place = jobs.folder_with(tmp_path_factory.mktemp("profile"))
    flags = ("--plan", PLAN, "--train.steps", "12", "--profile", "steps=6:7", "--model.d_model", "64")
    done = jobs.unisono(place, "train", "recipe.toml", "--json", *flags)
    assert done.code == 0, done.err
    assert "profiler_start" not in done.err and "CPUAllocator" not in done.err
    return Path(place, done.object["run_dir"])


@pytest.fixture(scope="module")
def said(run: Path) -> dict[str, Any]:
    return page.run(run)["profile"]


@pytest.fixture(scope="module")
def trace(run: Path, said: dict[str, Any]) -> Any:
    protos = pytest.importorskip(
        "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
        reason="pip install perfetto: its protos judge the trace",
    )
    decoded = protos.Trace()
    decoded.ParseFromString((run / "profile" / "trace.pftrace").read_bytes())
    return decoded


class Slice:
    def __init__(self, event: Any, start: int, depth: int) -> None:
        self.name, self.start, self.stop, self.depth, self.inside = event.name, start, start, depth, 0
        self.flows, self.ends = tuple(event.flow_ids), tuple(event.terminating_flow_ids)
        self.categories = tuple(event.categories)

    @property
    def own(self) -> int:
        return self.stop - self.start - self.inside


def tracks(trace: Any) -> dict[int, tuple[str, int]]:
    """(name, parent) of each track, by its number."""
    descriptors = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
    return {d.uuid: (d.name or d.process.process_name, d.parent_uuid) for d in descriptors}


def slices(trace: Any) -> dict[int, list[Slice]]:
    """Slices and moments of each track. Fails where ends do not match beginnings, or time runs backwards."""
    all_of: defaultdict[int, list[Slice]] = defaultdict(list)
    open_of: defaultdict[int, list[Slice]] = defaultdict(list)
    latest: Counter[int] = Counter()
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event, at = packet.track_event, packet.timestamp
        track, around = event.track_uuid, open_of[event.track_uuid]
        assert at >= latest[track], "a track's events are in order, or Perfetto drops them"
        latest[track] = at
        if event.type == event.TYPE_SLICE_END:
            ended = around.pop()
            ended.stop = at
            if around:
                around[-1].inside += at - ended.start
        elif event.type in (event.TYPE_SLICE_BEGIN, event.TYPE_INSTANT):
            made = Slice(event, at, len(around))
            all_of[track].append(made)
            if event.type == event.TYPE_SLICE_BEGIN:
                around.append(made)
    assert not any(open_of.values()), "every slice that begins ends"
    return all_of


def of_tracks(trace: Any, name: str) -> Iterator[tuple[str, list[Slice]]]:
    """(process, slices) of the tracks of a name."""
    names, parts = tracks(trace), slices(trace)
    for track, (called, parent) in names.items():
        if re.fullmatch(name, called):
            yield names[parent][0], parts.get(track, [])


def test_slices_of_a_track_lie_in_each_other(trace: Any) -> None:
    by_track = slices(trace)
    assert len(by_track) >= 4 * 4
    for parts in by_track.values():
        for outer, inner in pairwise(parts):
            assert inner.start >= outer.stop or inner.stop <= outer.stop, "none overlaps"
    processes = [name for name, parent in tracks(trace).values() if not parent]
    assert sorted(processes) == processes and len(processes) == 4
    assert processes[3] == "rank 3 (pp=1 dp=1)"


def test_every_send_has_its_receive(trace: Any) -> None:
    sends: Counter[int] = Counter()
    receives: dict[int, tuple[str, int]] = {}
    times: dict[int, tuple[str, int]] = {}
    for process, parts in of_tracks(trace, "step"):
        for part in parts:
            if part.name.startswith("send"):
                assert len(part.flows) == 1
                sends[part.flows[0]] += 1
                times[part.flows[0]] = process, part.start
            elif part.name == "pp recv":
                assert len(part.ends) == 1
                receives[part.ends[0]] = process, part.stop
    # Two steps, two replicas, two micro-batches, forward and back.
    assert len(sends) == sum(sends.values()) == 2 * 2 * 2 * 2
    assert sends.keys() == receives.keys()
    for flow, (process, at) in times.items():
        assert receives[flow][0] != process
        assert receives[flow][1] > at, "on one clock, what is received was sent before"


def test_a_collective_is_one_arrow_through_its_ranks(trace: Any) -> None:
    met: defaultdict[int, set[str]] = defaultdict(set)
    lone = 0
    for process, parts in of_tracks(trace, r"collectives \d+"):
        for part in parts:
            lone += not (part.flows or part.ends)
            for flow in (*part.flows, *part.ends):
                met[flow].add((process, part.name))
    assert met and not lone
    for ranks in met.values():
        assert len({name for _, name in ranks}) == 1
        (name,) = {name for _, name in ranks}
        assert len(ranks) == (4 if name.startswith("world ") else 2), ranks


def test_sums_of_the_trace_are_the_reports(trace: Any, said: dict[str, Any]) -> None:
    steps = said["last"] - said["first"] + 1
    forward, backward, having = Counter[str](), Counter[str](), Counter[str]()
    for _, parts in of_tracks(trace, "modules"):
        for name in {part.name for part in parts if "comm" not in part.categories}:
            having[name] += 1
        for part in parts:
            if "comm" not in part.categories:
                (forward if "forward" in part.categories else backward)[part.name] += part.own
    dear = [m for m in said["modules"] if not m["name"].startswith("(")][:10]
    assert len(dear) == 10
    for module in dear:
        name = module["name"]
        assert having[name] == module["ranks"]
        for sums, key in ((forward, "forward_s"), (backward, "backward_s")):
            assert sums[name] * 1e-9 / steps / having[name] == pytest.approx(module[key], rel=0.01), (
                name,
                key,
            )
    own = Counter[str]()
    for _, parts in of_tracks(trace, "operators"):
        for part in parts:
            own[part.name] += part.own
    for operator in said["operators"][:10]:
        if not operator["name"].startswith(("c10d", "unisono")):  # our waits lie inside, on another track
            assert own[operator["name"]] * 1e-9 / steps / 4 == pytest.approx(operator["seconds"], rel=0.01)


def test_memory_is_what_the_ledger_says(said: dict[str, Any]) -> None:
    predicted = said["predicted_bytes"]
    fullest = max(said["memory"], key=lambda peak: peak["kinds"]["params"])
    assert fullest["kinds"]["params"] == predicted["params"]
    assert fullest["kinds"]["optim"] == pytest.approx(predicted["optim"], rel=0.02)
    # The ledger counts a bucket on its way as a gradient, the profile as what comes and goes.
    come = sum(fullest["kinds"][kind] for kind in ("grads", "activations", "working"))
    assert come == pytest.approx(predicted["grads"] + predicted["activations"], rel=0.05)
    assert fullest["total"] == pytest.approx(sum(predicted.values()), rel=0.05)
    for peak in said["memory"]:
        assert peak["total"] == sum(peak["kinds"].values())
        came = peak["kinds"]["activations"] + peak["kinds"].get("working", 0)
        assert came <= sum(peak["modules"].values()) < peak["total"]
        assert peak["after"]["rss"] > 2**20


def test_the_page_has_the_section(run: Path, said: dict[str, Any]) -> None:
    text = (run / "report.html").read_text()
    assert 'data-testid="profile"' in text and "Dearest modules" in text
    assert said["modules"][1]["name"] in text
    assert (
        isinstance(said["overhead"], float) and "longer than its neighbours" in text and said["pause_s"] > 0
    )
    assert said["lines"] and all(0 <= line["share"] <= 1 for line in said["lines"])


def test_a_damaged_profile_is_named(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "profile" / "rank1.json.gz").write_bytes(b"nothing")
    result = page.run(copy)
    assert result["profile"] is None
    assert any("profile/ is damaged" in line for line in result["missing"])


@pytest.mark.slow
def test_holistic_trace_analysis_agrees(run: Path, said: dict[str, Any]) -> None:
    trace_analysis = pytest.importorskip(
        "hta.trace_analysis",
        reason="pip install --no-deps HolisticTraceAnalysis && pip install pandas plotly networkx: it judges our traces",
    )
    paths = sorted((run / "profile").glob("rank*.json.gz"))
    files = {rank: str(path) for rank, path in enumerate(paths)}
    theirs = trace_analysis.TraceAnalysis(trace_files=files).get_temporal_breakdown(visualize=False)
    assert len(theirs) == 4
    for ours in said["breakdown"]:
        row = theirs[theirs["rank"] == ours["rank"]].iloc[0]
        whole = row["kernel_time(us)"]
        assert whole * 1e-6 == pytest.approx(ours["whole_s"], rel=0.01)
        for column, key in (
            ("compute_time(us)", "computing_s"),
            ("non_compute_time(us)", "communicating_s"),
            ("idle_time(us)", "idle_s"),
        ):
            assert row[column] * 1e-6 == pytest.approx(ours[key], abs=0.01 * ours["whole_s"]), column


def test_spans_and_breakdown_are_the_same(run: Path, said: dict[str, Any]) -> None:
    """Kernels are made of spans, so computing is what the step's parts say."""
    for rank, ours in enumerate(said["breakdown"]):
        lines = [json.loads(line) for line in (run / "events" / f"rank{rank}.jsonl").read_text().splitlines()]
        parts = [line["time"] for line in lines if said["first"] <= line.get("step", 0) <= said["last"]]
        spent = sum(p["forward"] + p["backward"] + p["optim"] for p in parts)
        assert ours["computing_s"] == pytest.approx(spent, rel=0.01)
    assert digest([read(run / "profile" / "rank0.json.gz")]).first == 6


def test_innermost() -> None:
    assert innermost([(0, 10, "a"), (2, 6, "b"), (3, 4, "c"), (12, 13, "d")]) == [
        (0, 2, "a"), (2, 3, "b"), (3, 4, "c"), (4, 6, "b"), (6, 10, "a"), (12, 13, "d"),
    ]  # fmt: skip
    assert lanes([(0, 5), (1, 2), (2, 9), (5, 6)]) == [0, 1, 1, 0]
    assert union_ns([(0, 5), (3, 7), (9, 10)]) == 8


def test_varints() -> None:
    assert varint(0) == b"\x00" and varint(300) == b"\xac\x02" and len(varint(-1)) == 10
