"""What `unisono bench` measures: its words, its rows on real ranks, its table and its picture."""

import json
import math
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import World
from unisono import cli
from unisono.codecs import CODECS
from unisono.comm.collectives import COLLECTIVES
from unisono.spec.errors import UsageError
from unisono_contrib.measure import bench
from unisono_contrib.measure.benches import BENCHES, chosen, columns, compared, sizes_of, spread, within
from unisono_contrib.measure.benches.codecs import usual
from unisono_contrib.measure.benches.collectives import OPS, least_bytes
from unisono_contrib.measure.benches.net import pairs


def test_sizes_are_read() -> None:
    assert sizes_of("8,4KiB,1M,2GiB") == [8, 4096, 1 << 20, 2 << 30]
    for wrong in ("1TB", "x", "0", "1.5MiB"):
        with pytest.raises(UsageError, match="no size"):
            sizes_of(wrong)


def test_what_is_not_known_is_refused() -> None:
    assert chosen(None, ("a", "b"), "--ops") == ["a", "b"]
    assert chosen("b", ("a", "b"), "--ops") == ["b"]
    with pytest.raises(UsageError, match="'c'"):
        chosen("a,c", ("a", "b"), "--ops")


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=60))
def test_a_spread_holds_its_median(seconds: list[float]) -> None:
    got = spread(seconds)
    assert min(seconds) <= got["seconds_p05"] <= got["seconds"] <= got["seconds_p95"] <= max(seconds)


def test_a_ratio_is_taken_turn_by_turn() -> None:
    """A machine that is busy for a while is so for both: one slow turn changes nothing."""
    assert compared({"a": [1.0, 100.0, 1.0], "b": [2.0, 200.0, 2.0]}, "a", "b") == 2.0
    assert compared({"a": [1.0]}, "a", "b") is None


@given(st.integers(1, 60))
def test_the_interval_of_a_ratio_leaves_out_as_much_as_it_may(turns: int) -> None:
    """The median of all runs is outside if at most `cut` of the turns fall to one side of it: fair coins."""
    times = {"a": [1.0] * turns, "b": [float(i) for i in range(turns)]}
    low, high = within(times, "a", "b") or (0.0, 0.0)
    cut = int(low)
    assert high == turns - 1 - cut
    outside = [sum(math.comb(turns, i) for i in range(n + 1)) / 2 ** (turns - 1) for n in (cut, cut + 1)]
    assert outside[1] > 0.1 and (outside[0] <= 0.1 or cut == 0)
    assert within({"a": [1.0]}, "a", "b") is None


@given(st.integers(2, 64), st.integers(1, 1 << 20))
def test_least_bytes_agree_with_each_other(size: int, part: int) -> None:
    """An all-reduce is a reduce-scatter and an all-gather; whoever has it all to give sends it at least once."""
    least = {op: least_bytes(op, part * size, size) for op in OPS}
    assert least["all_reduce"] == least["reduce_scatter"] + least["all_gather"]
    assert least["broadcast"] == least["reduce"] == part * size
    assert least["scatter"] == least["all_to_all"] == (size - 1) * part
    assert least["gather"] == part
    assert all(least_bytes(op, part, 1) == 0 for op in OPS)


@given(st.integers(2, 9), st.integers(1, 40))
def test_pairs_are_different_ranks_and_each_once(ranks: int, most: int) -> None:
    found = [tuple(pair) for pair in pairs(ranks, most)]
    assert len(found) == len(set(found)) == min(most, ranks * (ranks - 1) // 2)
    assert all(0 <= a < b < ranks for a, b in found)


def test_columns_line_up() -> None:
    lines = columns(("name", "n"), (("a", "1.5"), ("long name", "–")))
    assert [len(line) for line in lines[1:]] == [len(lines[0])] * 2


def test_every_codec_of_the_family_comes_by_itself() -> None:
    given_options = {
        name
        for name in CODECS.names()
        if all(not f.is_required() for f in CODECS.find(name).model_fields.values())
        and not CODECS.read(name).rungs
    }
    assert given_options == {text for text in usual() if "+" not in text}


def measured(ctx: Any, what: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank."""
    from unisono.train.build.build import place_of

    live = import_module(BENCHES.find(what)().live)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    hosts = ["here"] * ctx.world
    return json.loads(json.dumps(live.rows(ctx, place, {**asked, "hosts": hosts, "seconds": 0.001})))


def shown(what: str, rows: list[dict[str, Any]], folder: Path, ranks: int) -> str:
    one = BENCHES.find(what)()
    facts = {"rows": rows, "ranks": ranks, "hosts": ["here"], "machine": bench.machine()}
    assert b"<svg" in bench.draw(one, facts, folder / "drawn.svg").read_bytes()
    for row in rows:
        assert any(key.startswith("ratio_vs_") for key in row)
    return "\n".join(one.table(rows))


@pytest.mark.timeout(120)
def test_each_collective_has_a_row_for_each_operation(world: World, tmp_path: Path) -> None:
    members = [name for name in COLLECTIVES.names() if name != "auto"]
    asked = {"members": members, "ops": list(OPS), "sizes": [4096], "rounds": 3}
    rows = world(measured, 2, what="collectives", asked=asked)[0]
    ran = [row for row in rows if row["skipped"] is None]
    assert {row["op"] for row in ran} == set(OPS)
    for name in members:
        mine = [row for row in rows if row["algorithm"] == name]
        assert mine, "a row, or why there is none"
        for row in mine:
            if row["skipped"] is None:
                assert row["seconds"] > 0
                assert row["ratio_vs_gloo"] > 0
                assert row["sent_bytes"] >= row["least_bytes"]
    assert {row["turns"] for row in ran} == {3}
    assert all(row["ratio_low"] <= row["ratio_vs_gloo"] <= row["ratio_high"] for row in ran)
    elsewhere = [row["op"] for row in ran if row["algorithm"] == "memory, from elsewhere"]
    assert elsewhere == ["all_reduce", "reduce_scatter", "all_gather"]
    assert "all_reduce" in shown("collectives", rows, tmp_path, 2)


@pytest.mark.timeout(120)
def test_messages_go_between_each_pair(world: World, tmp_path: Path) -> None:
    rows = world(measured, 3, what="net", asked={"pairs": pairs(3, 9), "sizes": [8, 100_000]})[0]
    assert {(row["from"], row["to"]) for row in rows} == {(0, 1), (1, 2), (0, 2)}
    assert len(rows) == 3 * 2 * 2
    assert all(row["seconds"] > 0 and row["ratio_vs_tcp"] > 0 for row in rows)
    assert "Mbit/s" in shown("net", rows, tmp_path, 3)


@pytest.mark.timeout(120)
def test_codecs_send_what_they_declare(world: World, tmp_path: Path) -> None:
    asked = {"members": usual(), "sizes": [64 << 10], "replicas": 4}
    (rows,) = world(measured, 1, group=False, what="codecs", asked=asked)
    mine = {row["codec"]: row for row in rows}
    assert set(usual()) <= set(mine)
    assert mine["plain"]["ratio_vs_fp32"] == 1.0
    for name in usual():
        row = mine[name]
        assert row["skipped"] is None, row
        assert row["sent_bytes"] == pytest.approx(row["declared_bytes"], rel=0.02, abs=256)
        assert 0 < row["encode_seconds"] <= row["seconds_p95"] * 50
    hooks = [row for row in rows if row["codec"].startswith("torch")]
    assert len(hooks) == 3
    assert any(row["skipped"] is None for row in hooks)
    assert "plain" in shown("codecs", rows, tmp_path, 1)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], "C04", "nothing says"),
        (["steps"], "C04", "steps"),
        (["net", "--ranks", "1"], "C02", "2 ranks or more"),
        (["net", "--codecs", "plain"], "C04", "--codecs"),
        (["collectives", "--sizes", "big"], "C02", "big"),
        (["collectives", "--rounds", "-1"], "C02", "-1 rounds"),
        (["collectives", "--collectives", "rong"], "P04", "rong"),
        (["codecs", "--replicas", "1"], "C02", "themselves"),
        (["codecs", "--out", "x.pdf"], "C04", "x.pdf"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], code: str, said: str
) -> None:
    assert cli.main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert f"error U-{code}" in err
    assert said in err


def test_help_shows_the_flags_of_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "net", "--help"]) == 0
    assert "--pairs" in capsys.readouterr().out
    assert cli.main(["bench", "--help"]) == 0
    assert "--pairs" not in capsys.readouterr().out


@pytest.mark.usefixtures("ranks_on_threads")
@pytest.mark.timeout(60)
def test_the_command_answers_with_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.strftime("%Y")
    words = ["bench", "collectives", "--ops", "all_reduce", "--collectives", "engine,messages"]
    words += ["--sizes", "1KiB", "--seconds", "0.001", "--json"]
    code = cli.main(words)
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (told["schema_version"], told["bench"], told["ranks"]) == (1, "collectives", 2)
    assert told["machine"]["date"].startswith(begun)
    assert [row["algorithm"] for row in told["rows"]] == ["gloo", "engine", "messages"]


OWN = """
from unisono_contrib.measure.benches.collectives import CollectivesBench


class Own(CollectivesBench):
    name = "mine"

    @property
    def live(self) -> str:
        return "unisono_contrib.measure.benches.collectives.live"
"""


@pytest.mark.usefixtures("ranks_on_threads")
@pytest.mark.timeout(60)
def test_a_users_own_bench_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = ["--ops", "all_reduce", "--collectives", "engine", "--sizes", "1KiB", "--seconds", "0.001"]
    assert cli.main(["bench", f"{tmp_path}/own.py:Own", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["bench"], [row["algorithm"] for row in answer["rows"]]) == ("mine", ["gloo", "engine"])
