"""`unisono federate`: one object of JSON, a run folder that other verbs read, processes that join, refusals."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.federated import certificates
from tests.federated.federations import FLAGS
from tests.forked import Forked
from unisono.cli import main
from unisono.observe.metrics import read_lines
from unisono.train.state.checkpoint import latest, read_full

pytestmark = pytest.mark.timeout(120)
ROUNDS = 3


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sections: dict[str, list[str]] = {}
    keys = FLAGS | {
        "federated.rounds": str(ROUNDS),
        "federated.clients": "5",
        "federated.participation": "0.6",
    }
    for key, value in keys.items():
        section, _, leaf = key.partition(".")
        text = value if value.replace(".", "").replace("-", "").isdigit() else f'"{value}"'
        sections.setdefault(section, []).append(f"{leaf} = {'[8]' if leaf == 'hidden' else text}")
    body = "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items())
    path = tmp_path / "fed.toml"
    path.write_text('name = "fed"\n' + body.replace("momentum = 0", "momentum = 0.0") + "\n")
    return path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    code = main(["federate", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out.strip() else {}, err


def weights_in(run_dir: str) -> dict[str, torch.Tensor]:
    folder = latest(Path(run_dir))
    assert folder is not None
    return {name: x for name, x in read_full(folder).items() if name.startswith("model/")}


def test_a_run_leaves_metrics_and_a_checkpoint_that_other_verbs_read(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, done, err = said(capsys, str(recipe), "--train.metrics", "accuracy", "--train.eval_every", "1")
    assert code == 0, err
    assert done["rounds"] == ROUNDS and 0.0 <= done["val_accuracy"] <= 1.0 and done["rounds_per_s"] > 0
    lines, damaged = read_lines(Path(done["run_dir"]) / "metrics.jsonl")
    assert not damaged and [line["step"] for line in lines] == [1, 2, 3]
    assert {"loss", "val_loss", "clients", "dropped", "bytes_received", "delta_norm"} <= lines[0].keys()
    assert main(["evaluate", done["run_dir"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == pytest.approx(lines[-1]["val_loss"])


def test_it_goes_on_from_where_it_was(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, whole, _ = said(capsys, str(recipe), "--train.save_every", "1")
    first = str(Path(whole["run_dir"], "checkpoints", "step-000001"))
    before = weights_in(whole["run_dir"])
    code, again, err = said(capsys, "--resume", first)
    assert code == 0, err
    assert again["run_dir"] == whole["run_dir"] and again["rounds"] == ROUNDS
    assert all(torch.equal(x, before[name]) for name, x in weights_in(again["run_dir"]).items())
    lines, _ = read_lines(Path(whole["run_dir"]) / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_several_processes_leave_the_weights_of_one(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, one, _ = said(capsys, str(recipe))
    code, two, err = said(capsys, str(recipe), "--workers", "2")
    assert code == 0, err
    before = weights_in(one["run_dir"])
    assert all(torch.equal(x, before[name]) for name, x in weights_in(two["run_dir"]).items())


@pytest.mark.parametrize(
    "words,code",
    [
        (("--plan", "dp=2"), "U-C06"),
        (("--federated.strategy", "scaffold", "--train.momentum", "0.9"), "U-C06"),
        (("--federated.split", "own"), "U-C06"),
        (("--federated.aggregate", "krum:attackers=3"), "U-C06"),
        (("--federated.strategy", "fedavg:mu=1"), "U-C02"),
        (("--serve", "127.0.0.1:0"), "U-C04"),
        (("--serve", "127.0.0.1:0", "--workers", "2"), "U-C04"),
        (("--workers", "0"), "U-C04"),
        (("--workers", "2", "--launch.threads_per_rank", "2"), "U-C06"),
        (("--serve", "127.0.0.1:0", "--join", "127.0.0.1:1"), "U-C04"),
        (("--join", "127.0.0.1:1", "--organisation", "milan", "--clients", "0"), "U-C04"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_played_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: str
) -> None:
    exit_code, _, err = said(capsys, str(recipe), *words)
    assert exit_code == 2 and f"error {code}" in err
    assert not list(Path("runs").rglob("*"))


def test_train_does_not_leave_clients_out_in_silence(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe)]) == 2
    assert "unisono train does not play [federated]" in capsys.readouterr().err


def test_a_run_does_not_go_on_with_other_clients(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, done, _ = said(capsys, str(recipe))
    code, _, err = said(capsys, "--resume", done["run_dir"], "--federated.clients", "6")
    assert code == 2 and "error U-K05" in err and "federated.clients" in err


def test_a_recipe_without_clients_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plain.toml"
    path.write_text('[model]\nkind = "mlp"\n[data]\nsource = "digits"\n')
    exit_code, _, err = said(capsys, str(path))
    assert exit_code == 2 and "no [federated] section" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [(), ("--federated.secure", "true"), ("--federated.strategy", "scaffold")],
    ids=["plain", "secure", "scaffold"],
)
def test_processes_that_join_over_tls_have_the_bits_of_simulated_clients(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: tuple[str, ...]
) -> None:
    authority, certificate, key = certificates.written(tmp_path)
    (tmp_path / "tokens.toml").write_text(f'[milan]\ntoken = "{"m" * 20}"\n[oslo]\ntoken = "{"o" * 20}"\n')
    (tmp_path / "milan").write_text("m" * 20 + "\n")
    (tmp_path / "oslo").write_text("o" * 20)
    common = ["-m", "unisono", "federate", str(recipe), *keys, "--json", "--out.dir", "real"]
    tls = ["--tokens", "tokens.toml", "--certificate", certificate, "--key", key]
    server = Forked([*common, "--serve", "127.0.0.1:0", *tls], tmp_path, os.environ)
    port = _port(tmp_path / "real")
    joins = [
        Forked(
            [*common, "--join", f"127.0.0.1:{port}", "--organisation", name, "--token", name, "--clients", clients,
             "--authority", authority, "--state", "state"],
            tmp_path, os.environ,
        )
        for name, clients in (("milan", "0-2"), ("oslo", "3,4"))
    ]  # fmt: skip
    assert server.wait(60) == 0, server.stderr.read()
    done = json.loads(server.stdout.read())
    for process in joins:
        assert process.wait(30) == 0, process.stderr.read()
    _, simulated, _ = said(capsys, str(recipe), *keys)
    assert bool(list(tmp_path.glob("state/*/client-*/*.safetensors"))) == ("scaffold" in keys)
    real = weights_in(str(tmp_path / done["run_dir"]))
    assert all(torch.equal(x, real[name]) for name, x in weights_in(simulated["run_dir"]).items())


def _port(folder: Path) -> int:
    """Where the server says that it listens."""
    import time

    until = time.monotonic() + 30
    while time.monotonic() < until:
        for path in folder.rglob("federation.json"):
            return json.loads(path.read_text())["port"]
        time.sleep(0.05)
    raise AssertionError("the server does not say where it listens")
