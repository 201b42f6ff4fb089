"""Shards in an object store (moto stands in for S3): runs that are killed at random and go on with other ranks have the
losses, step by step, of one rank that was never disturbed."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.data.stream import shards
from tests.verbs.jobs import lines, losses, runs_of, started, unisono
from unisono.library.streaming import StreamingLoader

pytest.importorskip("s3fs", reason="shards in S3 are not tested without s3fs: pip install 'unisono[remote]'")
moto = pytest.importorskip(
    "moto.server", reason="shards in S3 are not tested without moto: pip install 'moto[server]'"
)
pytestmark = pytest.mark.timeout(600)

_EXACT = " precision=fp64"
STEPS = """\
name = "stream"
[model]
{model}
[data]
source = "{source}"
cache = "cache"
val_fraction = 0.0
workers = 1
[train]
steps = {steps}
global_batch = 12
micro_batch = 1
dtype = "float64"
save_every = 2
eval_batches = 1
[out]
dir = "runs"
report = false
"""
PICTURES = 'kind = "mlp"\nimage = [3, 6, 6]'
TEXT = "n_layer = 1\nn_head = 2\nd_model = 16\ncontext = 16"


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """An S3 of this machine: the environment that leads to it."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing",
    }  # fmt: skip
    server.stop()


def put(environ: dict[str, str], bucket: str, bodies: Any, ending: str) -> str:
    """Shards in a bucket of their own; the pattern that means them."""
    boto3 = pytest.importorskip("boto3")
    client = boto3.client("s3", endpoint_url=environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    count = 0
    for count, body in enumerate(bodies, 1):
        client.put_object(Bucket=bucket, Key=f"{count - 1:03d}.{ending}", Body=body)
    return f"s3://{bucket}/{{000..{count - 1:03d}}}.{ending}"


@pytest.fixture
def at_s3(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    return s3


def test_a_bucket_is_read_as_a_folder_is(at_s3: dict[str, str], tmp_path: Path) -> None:
    bodies = list(shards.picture_tars(20, 3))
    put(at_s3, "small", bodies, "tar")
    sources = "s3://small/*.tar", f"tar:{shards.written(tmp_path / 'tar', bodies, 'tar')}"
    more = {"image": (3, 6, 6), "epochs": 2, "workers": 1, "cache": str(tmp_path / "cache")}
    batches = [list(StreamingLoader(source, 8, **more)) for source in sources]  # type: ignore[arg-type]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.samples, other.samples)


def bodies_of(kind: str) -> tuple[Any, str, str, int]:
    """(shards, their ending, keys of the model, samples) of 50 shards."""
    if kind == "tar":
        return shards.picture_tars(150, 50), "tar", PICTURES, 150
    documents = [shards.texts(4, i) for i in range(50)]
    tokens = sum(len(text) + 1 for each in documents for text in each)
    if kind == "jsonl":
        return map(shards.lines, documents), "jsonl", TEXT, (tokens - 1) // 16
    from tests.train.data.stream.test_stream_corpus import tables

    return (
        tables([[{"text": text} for text in each] for each in documents], 2),
        "parquet",
        TEXT,
        (tokens - 1) // 16,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tar", "jsonl", "parquet"])
def test_killed_three_times_and_resumed_on_other_ranks_it_ends_as_one_rank_does(
    at_s3: dict[str, str], tmp_path: Path, kind: str
) -> None:
    bodies, ending, model, samples = bodies_of(kind)
    source = f"{kind}:{put(at_s3, f'many-{kind}', bodies, ending)}"
    steps, draw = 3 * samples // 12, random.Random(kind)
    for name in ("alone", "killed"):
        (tmp_path / name).mkdir()
        recipe = STEPS.format(model=model, source=source, steps=steps)
        (tmp_path / name / "recipe.toml").write_text(recipe)
    done = unisono(tmp_path / "alone", "train", "recipe.toml", "--json", "--plan", f"dp=1{_EXACT}")
    assert done.code == 0, done.err
    place = tmp_path / "killed"
    words = ("train", "recipe.toml", "--json", "--resume", "auto", "--plan")
    reached = 0
    for i, ranks in enumerate((4, 2, 3)):
        reached = draw.randint(reached + 1, (i + 1) * steps // 4)
        with started(place, *words, f"dp={ranks}{_EXACT}", environ=at_s3) as job:
            job.steps(reached + 1)
            assert not job.kill_group()
        reached = lines(runs_of(place)[0])
    done = unisono(place, *words, f"dp=4{_EXACT}")
    assert done.code == 0, done.err
    assert len(runs_of(place)) == 1
    alone, killed = losses(runs_of(tmp_path / "alone")[0]), losses(runs_of(place)[0])
    assert list(alone) == list(killed) == [*range(1, steps + 1)]
    # A sum over three ranks is rounded in another order; a batch with one other sample differs in the second digit.
    assert all(abs(alone[step] - killed[step]) < 1e-9 for step in alone)
    state = json.loads((runs_of(place)[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert state["step"] == steps
