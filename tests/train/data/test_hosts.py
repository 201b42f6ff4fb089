"""Data hosts read what a rank would, to the bit, and whichever dies, no sample is lost or read twice."""

import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.data.stream import shards
from tests.train.data.test_load import refused
from tests.verbs.jobs import losses, runs_of, started, unisono
from unisono.config import DataConfig, ModelConfig
from unisono.library.streaming import StreamingLoader
from unisono.spec.errors import UserCodeError
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Permuted
from unisono.train.data.load import load
from unisono_contrib.train.data.data_host import DataHost
from unisono_contrib.train.data.host_secret import secret_path, token_at
from unisono_contrib.train.data.host_words import facts_of, narrowed, widened

pytestmark = pytest.mark.timeout(120)
SHAPE = (3, 6, 6)
CHATS = '{{"prompt": "{0} plus 1? ", "completion": "it is {1}"}}\n'


class Served:
    """Hosts of this process, of one recipe."""

    def __init__(self, folder: Path, source: str, model: ModelConfig, **keys: Any) -> None:
        self.data = DataConfig(
            source=source, cache=str(folder / "cache"), val_fraction=0.25, workers=2, **keys
        )
        self.model, self.alone, self.hosts = model, load(self.data, model), list[DataHost]()

    def start(self, **keys: Any) -> str:
        data = self.data.model_copy(update=keys)
        return f"127.0.0.1:{self.host(load(data, self.model), data).port}"

    def host(self, corpus: Corpus, data: DataConfig, port: int = 0) -> DataHost:
        listener = socket.create_server(("127.0.0.1", port))
        token = token_at(secret_path(data), makes=True)
        self.hosts.append(DataHost(listener, token, corpus, facts_of(corpus, data), data.cache))
        return self.hosts[-1]

    def corpus(self, *places: str, **keys: Any) -> Corpus:
        return load(self.data.model_copy(update={"hosts": places, **keys}), self.model)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    (tmp_path / "mine.py").write_text(
        "def noisy(picture, draw):\n    import numpy as np\n    pixels = np.asarray(picture).transpose(2, 0, 1)\n"
        "    return pixels if draw is None else pixels / 255 + draw.normal(size=pixels.shape)\n"
        "def raises(picture, draw):\n    return picture.nothing\n"
    )
    every = list[Served]()

    def serve(kind: str = "pictures", **keys: Any) -> Served:
        if kind == "pictures":
            source = f"tar:{shards.written(tmp_path / 'tar', shards.picture_tars(60, 3), 'tar')}"
            model = ModelConfig(kind="convnet", image=SHAPE)
        else:
            lines = "".join(CHATS.format(i, i + 1) for i in range(90)).encode()
            shards.written(tmp_path / "chats", [lines], "jsonl")
            source = f"jsonl:{tmp_path / 'chats'}" + (",stream=true" if kind == "chats" else "")
            model = ModelConfig(context=64)
        every.append(Served(tmp_path, source, model, **keys))
        return every[-1]

    yield serve
    for each in every:
        for host in each.hosts:
            host.close()


def steps(corpus: Corpus, count: int, first: int = 0) -> list[list[torch.Tensor]]:
    """Inputs, targets, documents of steps of 12 samples, and of a validation."""
    feeds = Permuted(corpus.train, 3, 12, 3), Permuted(corpus.val, 4, 6, 3, repeat=True)
    leaves = [leaf for i in range(first, first + count) for leaf in feeds[0].fetch(i, range(4))]
    leaves += feeds[1].fetch(0, range(2))
    for feed in feeds:
        feed.close()
    return [[x for x in (m.inputs, m.targets, m.samples, m.documents) if x is not None] for m in leaves]


def same(one: list[list[torch.Tensor]], two: list[list[torch.Tensor]]) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(x, y)
        for a, b in zip(one, two, strict=True)
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("kind", ["pictures", "chats", "packed"])
def test_samples_of_hosts_are_those_that_are_read_here(served: Callable[..., Served], kind: str) -> None:
    here = served(kind)
    places = here.start(), here.start(worker_kind="processes")
    assert same(steps(here.alone, 6), steps(here.corpus(*places), 6))
    assert all(host.samples > 30 for host in here.hosts)


def test_a_users_function_draws_on_a_host_what_it_draws_here(
    served: Callable[..., Served], tmp_path: Path
) -> None:
    here = served(transform=f"{tmp_path / 'mine.py'}:noisy")
    assert same(steps(here.alone, 8), steps(here.corpus(here.start()), 8))


def test_hosts_that_come_and_go_change_no_sample(
    served: Callable[..., Served], capfd: pytest.CaptureFixture[str]
) -> None:
    here = served()
    places = here.start(), here.start()
    corpus, alone, read = here.corpus(*places), steps(here.alone, 12), list[list[torch.Tensor]]()
    feed = Permuted(corpus.train, 3, 12, 3)
    for i in range(12):
        if i in (3, 6):
            here.hosts[i // 3 - 1].close()
        read += [[m.inputs, m.targets, m.samples] for m in feed.fetch(i, range(4))]
    feed.close()
    assert same(alone[:48], read)
    said = capfd.readouterr().err
    assert all(said.count(f"data host {place} does not answer") == 1 for place in places)


def test_a_host_that_is_started_again_is_used_again(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono_contrib.train.data.hosts._AGAIN", 0.01)
    here = served()
    place = here.start()
    corpus = here.corpus(place)
    steps(corpus, 1)
    here.hosts[0].close()
    steps(corpus, 1)  # it is noticed, and called again from now on
    again = here.host(here.alone, here.data, int(place.rpartition(":")[2]))
    while not again.samples:
        steps(corpus, 1)


def test_other_data_another_secret_and_no_secret_are_refused(
    served: Callable[..., Served], tmp_path: Path
) -> None:
    here = served()
    refused("D20", lambda: here.corpus("127.0.0.1:1", hosts_token=str(tmp_path / "none")))
    error = refused("D20", lambda: steps(here.corpus(here.start(val_fraction=0.5)), 1))
    assert "samples [30, 30], not [45, 15]" in error.what
    (tmp_path / "other").write_text("x" * 32)
    error = refused("D20", lambda: steps(here.corpus(here.start(), hosts_token=str(tmp_path / "other")), 1))
    assert "secret" in error.what
    (tmp_path / "other").write_text("short")
    refused("D20", lambda: here.corpus("127.0.0.1:1", hosts_token=str(tmp_path / "other")))
    assert oct((tmp_path / "cache" / "hosts.token").stat().st_mode)[-3:] == "600"


def test_ranks_need_not_read_shards_that_a_host_has_indexed(
    served: Callable[..., Served], tmp_path: Path
) -> None:
    here = served("chats")
    place, alone, shard = here.start(), steps(here.alone, 4), tmp_path / "chats" / "000.jsonl"
    stat, body = shard.stat(), shard.read_bytes()
    shard.write_bytes(b"?" * len(body))
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other = {"cache": str(tmp_path / "other"), "hosts_token": str(tmp_path / "cache" / "hosts.token")}
    assert same(alone, steps(here.corpus(place, **other), 4))
    refused("D14", lambda: here.corpus(**{**other, "cache": str(tmp_path / "third")}))


def test_what_is_wrong_with_the_data_is_said_as_here(served: Callable[..., Served], tmp_path: Path) -> None:
    here = served()
    corpus, broken = here.corpus(here.start()), tmp_path / "tar" / "001.tar"
    body = broken.read_bytes()
    at = body.index(b"PNG", 20_000)
    stat = broken.stat()
    broken.write_bytes(body[:at] + b"GNP" + body[at + 3 :])
    os.utime(broken, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    error = refused("D14", lambda: steps(corpus, 4))
    assert error.where == f"{broken}:{at - 1}"
    with pytest.raises(UserCodeError, match="AttributeError") as raised:
        wrong = served(transform=f"{tmp_path / 'mine.py'}:raises")
        steps(wrong.corpus(wrong.start()), 1)
    assert "mine.py:6 in raises" in raised.value.where


def test_a_host_that_hangs_is_done_without(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It greets as a host does, and then says nothing more."""
    monkeypatch.setattr("unisono_contrib.train.data.hosts.PATIENCE", 0.5)
    here = served()
    place, alone = here.start(), steps(here.alone, 2)

    class Silent(DataHost):
        def _reply(self, *_: Any) -> None:
            pass

    token = token_at(secret_path(here.data))
    facts = facts_of(here.alone, here.data)
    here.hosts.append(
        Silent(socket.create_server(("127.0.0.1", 0)), token, here.alone, facts, here.data.cache)
    )
    silent = f"127.0.0.1:{here.hosts[-1].port}"
    assert same(alone, steps(here.corpus(silent, place), 2))
    assert f"data host {silent} does not answer" in capfd.readouterr().err
    assert here.hosts[0].samples >= 2 * 12 + 6


def test_a_loop_of_ones_own_has_hosts_too(served: Callable[..., Served], tmp_path: Path) -> None:
    here = served()
    keys = {"image": SHAPE, "epochs": 1, "cache": str(tmp_path / "cache"), "val_fraction": 0.25}
    alone = [*StreamingLoader(here.data.source, 8, **keys)]
    for one, two in zip(
        alone, StreamingLoader(here.data.source, 8, hosts=(here.start(),), **keys), strict=True
    ):
        assert all(map(torch.equal, one, two))
    assert here.hosts[0].samples == 45


def test_the_command_says_what_it_would_do_and_what_is_wrong(tmp_path: Path) -> None:
    would = unisono(tmp_path, "data", "--at", "10.0.0.5:7400", "--dry-run", "--json").object
    assert would["dry_run"] and would["at"] == "10.0.0.5:7400"
    wrong = unisono(tmp_path, "data", "--at", "here")
    assert wrong.code == 2 and "U-C04" in wrong.block and "ADDRESS:PORT" in wrong.block


def test_tensors_come_back_to_the_bit_in_few_bytes() -> None:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 3, 5, 5), generator=draw, dtype=torch.uint8)
    every = [
        pixels.to(torch.float32) / 255, torch.rand(9, generator=draw), torch.randn(9, generator=draw), torch.zeros(0),
        torch.tensor([0, 255]), torch.tensor([-100, 255]), torch.tensor([0, 1 << 20]), torch.tensor([1 << 40]),
        torch.randn(3, dtype=torch.float64), torch.tensor([True]), torch.full((2,), float("nan")),
    ]  # fmt: skip
    how, narrow = narrowed(every)
    assert [x.element_size() for x in narrow] == [1, 4, 4, 4, 1, 2, 4, 8, 8, 1, 4]
    for x, y in zip(every, widened(how, narrow), strict=True):
        assert x.dtype == y.dtype and torch.equal(x.nan_to_num(7), y.nan_to_num(7))


def test_a_stranger_gets_nothing(served: Callable[..., Served]) -> None:
    here = served()
    address, _, port = here.start().rpartition(":")
    for words in (b"\0\0\0\4what", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
        with socket.create_connection((address, int(port)), 20) as sock:
            sock.sendall(words)
            sock.shutdown(socket.SHUT_WR)
            said = b""
            with contextlib.suppress(ConnectionError):
                while data := sock.recv(4096):
                    said += data
            assert b"fingerprint" not in said
    assert same(steps(here.alone, 2), steps(here.corpus(f"{address}:{port}"), 2))


RECIPE = """\
name = "hosted"
[model]
kind = "mlp"
image = [3, 6, 6]
[data]
source = "{source}"
cache = "cache"
workers = 1
transform = "{transform}"
val_fraction = 0.0
[train]
steps = 200
global_batch = 12
micro_batch = 3
dtype = "float64"
[out]
dir = "runs"
report = false
"""


def test_a_host_killed_in_mid_run_changes_no_bit_of_the_losses(
    served: Callable[..., Served], tmp_path: Path
) -> None:
    here = served()
    plan = ("--json", "--plan", "dp=2 precision=fp64")
    for name in ("alone", "served"):
        (tmp_path / name).mkdir()
        text = RECIPE.format(source=here.data.source, transform=f"{tmp_path / 'mine.py'}:noisy")
        (tmp_path / name / "recipe.toml").write_text(text)
    done = unisono(tmp_path / "alone", "train", "recipe.toml", *plan)
    assert done.code == 0, done.err
    place = tmp_path / "served"
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(started(place, "data", "recipe.toml")) for _ in range(2)]
        for host in hosts:
            host.hear("serves 60 samples at ")
        at = [host.lines[-1].rpartition(" ")[2].strip() for host in hosts]
        job = stack.enter_context(started(place, "train", "recipe.toml", *plan, "--data.hosts", ",".join(at)))
        job.steps(4)
        hosts[0].process.kill()
        done = job.done()
        assert done.code == 0 and f"data host {at[0]} does not answer" in done.err, done.err
        assert f"data host {at[1]}" not in done.err
        os.kill(hosts[1].process.pid, signal.SIGINT)
        said = hosts[1].done().err
    assert losses(runs_of(tmp_path / "alone")[0]) == losses(runs_of(place)[0])
    count = re.search(r"served ([\d,]+) samples", said)
    assert count is not None, said
    assert int(count[1].replace(",", "")) > 200 * 12 * 2 / 3  # its half, and more once it was alone
