"""`unisono lab` as a command: what it would do, what it refuses, whose flags are whose, what it tells at the end."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from unisono import cli
from unisono_contrib.lab import network
from unisono_contrib.lab.links import LabLink
from unisono_contrib.lab.network import DeviceBytes
from unisono_contrib.verbs.lab import Tally, table


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["lab", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_dry_run_names_each_process(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = answered(
        capsys,
        "--hosts",
        "2",
        "--ranks",
        "3",
        "--delay",
        "5ms",
        "--dry-run",
        "--",
        "unisono",
        "train",
        "--demo",
    )
    assert code == 0
    head, *lines = out.splitlines()
    assert head == "2 hosts, 100 Mbit/s, 5 ms one way"
    assert [line.split()[0] for line in lines] == ["host0", "host0", "host1"]
    assert all(line.endswith("unisono train --demo") for line in lines)
    assert "RANK=2" in lines[2]
    assert "MASTER_ADDR=host0" in lines[2]


def test_flags_behind_the_dashes_are_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["unisono", "bench", "net", "--json", "--help", "--quiet"]
    code, out, _ = answered(capsys, "--hosts", "2", "--dry-run", "--", *words)
    assert code == 0
    assert out.splitlines()[1].endswith(" ".join(words)), "no JSON, no help: those are not ours"
    code, out, _ = answered(capsys, "--json", "--hosts", "2", "--rate", "1gbit", "--dry-run", "--", *words)
    told = json.loads(out)
    assert code == 0
    assert told["rate_bit_s"] == 1e9
    assert told["commands"] == [{"host": 0, "argv": words}, {"host": 1, "argv": words}]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--hosts", "2"], "C04", "no command"),
        (["--hosts", "2", "--"], "C04", "no command"),
        (["--rate", "fast", "--", "true"], "C04", "fast"),
        (["--delay", "1h", "--", "true"], "C04", "1h"),
        (["--hosts", "4", "--ranks", "3", "--", "true"], "C02", "some would have none"),
        (["--hosts", "0", "--", "true"], "C02", "0 hosts"),
        (["--starter", "nobody", "--", "true"], "L02", "nobody"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], code: str, said: str
) -> None:
    left, _, err = answered(capsys, *words)
    assert left == 2
    assert f"error U-{code}" in err
    assert said in err


@pytest.mark.parametrize("missing", ["root", "ip", "tc"])
def test_it_skips_aloud(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    """77 and one line, and the command was not run."""
    have = shutil.which
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000 if missing == "root" else 0)
    monkeypatch.setattr(
        network.shutil, "which", lambda tool: None if tool == missing else have(tool) or f"/sbin/{tool}"
    )
    code, out, err = answered(capsys, "--hosts", "2", "--", "touch", str(tmp_path / "ran"))
    assert code == 77
    assert out == ""
    assert err.startswith(f"error U-L06  skipped: a lab needs {missing}")
    assert not (tmp_path / "ran").exists()


def test_bytes_stand_beside_those_that_the_run_counts(tmp_path: Path) -> None:
    events = tmp_path / "runs" / "demo" / "1" / "events"
    events.mkdir(parents=True)
    lines = [{"kind": "step", "bytes": {"dp.all_reduce": 100, "pp.send": 20}}, {"kind": "else"}]
    old = events / "rank0.jsonl"
    old.write_text(json.dumps(lines[0]) + "\n")
    tally = Tally(tmp_path / "runs" / "demo", time.time(), {old: old.stat().st_size})
    with old.open("a") as more:
        more.write("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    (events / "rank1.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert tally.payload() == 240, "of both ranks, without what stood there before"
    said = table([DeviceBytes(150, 130), DeviceBytes(130, 150)], 240, LabLink(8e3), 1.0)
    assert said[1].split()[-2:] == ["15", "%"]
    assert "1.167 bytes a byte" in said[-1]
    assert "not counted" in table([DeviceBytes(1, 1)], None, LabLink(0.0), 1.0)[-1]
    assert Tally(None, 0.0, {}).payload() is None


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(300)
@pytest.mark.skipif(not (shutil.which("ip") and shutil.which("tc")), reason="no ip and tc (iproute2) here")
def test_a_run_crosses_the_links(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of two replicas leave their hosts: devices carry the payload, and hardly more."""
    import sys

    import unisono

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(unisono.__file__).parents[1]))
    words = ["train", "--demo", "--plan", "dp=2", "--train.steps", "4", "--quiet"]
    code = cli.main(
        ["lab", "--json", "--hosts", "2", "--rate", "1gbit", "--", sys.executable, "-m", "unisono", *words]
    )
    told = json.loads(capfd.readouterr().out)
    assert code == told["exit"] == 0
    assert told["payload_bytes"] > 1e6
    carried = sum(one["sent"] for one in told["links"])
    assert told["payload_bytes"] <= carried <= 1.2 * told["payload_bytes"] + 1e5
    assert os.environ.get("RANK") is None
