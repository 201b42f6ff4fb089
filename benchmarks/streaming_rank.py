"""One rank of one loader, for `streaming.py`: reads batches of pictures, writes what it saw, and saves its state.

    python benchmarks/streaming_rank.py '{"loader": "webdataset", "folder": "...", "rank": 0, "world": 1, ...}'

Each loader is set up as its own documentation says for exact resumption, with shuffling. Decoding is the same for all.
A batch is a list of the numbers of its pictures (the class of each is its number) and float32 pixels.
"""

import io
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 64


def decoded(body: bytes) -> Any:
    """A picture, float32 [3, H, W] in 0..1."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(body)) as image:
        fitted = ImageOps.fit(image.convert("RGB"), (SIZE, SIZE), Image.Resampling.BILINEAR)
    return np.asarray(fitted, dtype=np.uint8).transpose(2, 0, 1).astype(np.float32) / np.float32(255)


Batches = Iterator[list[int]]
Opened = tuple[Callable[[int], Batches], Callable[[], Any], Callable[[Any], None]]
# (epoch → batches, state, load a state)


def ours(how: dict[str, Any]) -> Opened:
    """Global batches, of which this rank takes its part; epochs follow each other."""
    from unisono.library.streaming import StreamingLoader

    loader = StreamingLoader(
        f"tar:{how['folder']}/tar", how["batch"] * how["world"], image=(3, SIZE, SIZE),
        seed=1, epochs=how["epochs"], rank=how["rank"], world=how["world"], workers=how["workers"],
        cache=f"{how['folder']}/cache", worker_kind=how.get("worker_kind", "threads"),
        transform=how.get("transform", ""),
    )  # fmt: skip
    return lambda epoch: (b.samples.tolist() for b in loader), loader.state_dict, loader.load_state_dict


def webdataset(how: dict[str, Any]) -> Opened:
    """Shards split by node and worker; it has no state, and begins its epoch again."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    os.environ.update(RANK=str(how["rank"]), WORLD_SIZE=str(how["world"]))
    urls = f"{how['folder']}/tar/{{000..{how['shards'] - 1:03d}}}.tar"
    dataset: Any = wds.WebDataset(
        urls, shardshuffle=100, nodesplitter=wds.split_by_node, seed=1, empty_check=False
    )
    dataset = dataset.shuffle(500).map(lambda s: (decoded(s["jpg"]), int(s["cls"])))
    loader = DataLoader(dataset, batch_size=how["batch"], num_workers=how["workers"])
    return lambda epoch: (labels.tolist() for _, labels in loader), lambda: None, lambda state: None


class Files:
    """Pictures of the tars, found by number: what a loader with random access is given."""

    def __init__(self, folder: str) -> None:
        spans = np.load(f"{folder}/spans.npy")
        self.spans, self.folder = spans, folder

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        shard, start, size = self.spans[int(index)].tolist()
        with open(f"{self.folder}/tar/{shard:03d}.tar", "rb") as file:
            file.seek(start)
            return decoded(file.read(size)), int(index)


def torchdata(how: dict[str, Any]) -> Opened:
    """StatefulDataLoader with its sampler for several ranks."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    dataset: Any = Files(how["folder"])
    sampler = StatefulDistributedSampler(dataset, how["world"], how["rank"], seed=1)
    loader = StatefulDataLoader(dataset, how["batch"], sampler=sampler, num_workers=how["workers"])

    def epoch(number: int) -> Batches:
        sampler.set_epoch(number)
        return (labels.tolist() for _, labels in loader)

    return epoch, loader.state_dict, loader.load_state_dict


def mosaic(how: dict[str, Any]) -> Opened:
    """mosaicml-streaming over MDS shards; its state is one for all ranks."""
    os.environ.update(
        RANK=str(how["rank"]), WORLD_SIZE=str(how["world"]), LOCAL_RANK=str(how["rank"]),
        LOCAL_WORLD_SIZE=str(how["world"]), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(how["port"]),
    )  # fmt: skip
    from streaming import StreamingDataLoader, StreamingDataset

    class Pictures(StreamingDataset):
        def __getitem__(self, at: int) -> Any:
            sample = super().__getitem__(at)
            return decoded(sample["jpg"]), sample["number"]

    dataset = Pictures(
        local=f"{how['folder']}/mds",
        batch_size=how["batch"],
        shuffle=True,
        shuffle_seed=1,
        num_canonical_nodes=1,
    )
    loader = StreamingDataLoader(dataset, batch_size=how["batch"], num_workers=how["workers"])
    return lambda epoch: (labels.tolist() for _, labels in loader), loader.state_dict, loader.load_state_dict


def litdata(how: dict[str, Any]) -> Opened:
    """litdata's StreamingDataLoader over its own chunks."""
    if how["world"] > 1:  # from which it takes its rank
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", how["port"], how["world"], how["rank"] == 0)
        dist.init_process_group("gloo", store=store, rank=how["rank"], world_size=how["world"])
    import litdata as ld

    class Pictures(ld.StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return decoded(sample["jpg"]), sample["number"]

    dataset = Pictures(f"{how['folder']}/lit", shuffle=True, seed=1, drop_last=False)
    loader = ld.StreamingDataLoader(
        dataset, batch_size=how["batch"], num_workers=how["workers"], shuffle=True
    )
    return lambda epoch: (labels.tolist() for _, labels in loader), loader.state_dict, loader.load_state_dict


def grain(how: dict[str, Any]) -> Opened:
    """Grain's DataLoader with its index sampler, sharded by rank."""
    from grain import python as pygrain

    class Pair(pygrain.MapTransform):
        def map(self, element: Any) -> Any:
            return element

    source = Files(how["folder"])
    sampler = pygrain.IndexSampler(
        len(source), shard_options=pygrain.ShardOptions(how["rank"], how["world"]), shuffle=True,
        num_epochs=how["epochs"], seed=1,
    )  # fmt: skip
    operations = [Pair(), pygrain.Batch(how["batch"])]
    loader = pygrain.DataLoader(
        data_source=source, sampler=sampler, operations=operations, worker_count=how["workers"]
    )
    walk = iter(loader)

    def load(state: Any) -> None:
        walk.set_state(state)

    return lambda epoch: (labels.tolist() for _, labels in walk), walk.get_state, load


LOADERS = {
    "ours": ours, "webdataset": webdataset, "torchdata": torchdata, "mosaicml-streaming": mosaic,
    "litdata": litdata, "grain": grain,
}  # fmt: skip
WHOLE = ("ours", "grain")  # their walk goes through all epochs


def main(how: dict[str, Any]) -> None:
    """Walk until `steps` batches or the end; what was seen is a line for each batch: its epoch and its samples."""
    epoch, state, load = LOADERS[how["loader"]](how)
    at, steps, begun, samples = 0, 0, None, 0
    if how.get("state"):
        saved = pickle.loads(Path(how["state"]).read_bytes())  # noqa: S301 written by a rank of this run
        at = saved["epoch"]
        if saved["state"] is not None:
            load(saved["state"])
    snapshots = []
    with open(how["seen"], "a") as seen:
        while at < how["epochs"]:
            for labels in epoch(at):
                seen.write(json.dumps([at, labels]) + "\n")
                begun = begun or time.perf_counter()
                samples, steps, last = samples + len(labels), steps + 1, time.perf_counter()
                first = len(labels) if steps == 1 else 0
                samples -= first
                if steps == how.get("steps", -1):
                    break
                if how.get("snapshots"):
                    before = time.perf_counter()
                    state()
                    snapshots.append(time.perf_counter() - before)
            else:
                at = how["epochs"] if how["loader"] in WHOLE else at + 1
                continue
            break
    if how.get("save"):
        Path(how["save"]).write_bytes(pickle.dumps({"epoch": at, "state": state()}))
    rate = samples / (last - begun) if begun and last > begun else 0.0
    print(json.dumps({"rate": rate, "snapshot_ms": 1e3 * float(np.median(snapshots)) if snapshots else None}))
    sys.stdout.flush()
    os._exit(0)  # some leave threads and processes that would be waited for


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
