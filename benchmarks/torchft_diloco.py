"""torchft's own DiLoCo over Gloo, as one of the ways of `whole_runs`. Whoever wants to see it installs it beside:

pip install --target PEERS --no-deps torchft==0.2.0
pip install --target PEERS opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
PYTHONPATH=PEERS python benchmarks/spectrum.py
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
from peers import Task, adamw, by_hand
from torch import nn
from torch.optim import SGD

from unisono.config import TrainConfig

TORCHFT = "torchft"
MISSING = "not installed: pip install --no-deps torchft==0.2.0, and what benchmarks/torchft_diloco.py names"
WITHIN = timedelta(seconds=120)


def is_there() -> bool:
    return find_spec("torchft") is not None and find_spec("opentelemetry") is not None


def stepper(task: Task, model: nn.Module, host: str, settings: Mapping[str, Any]) -> Callable[[], float]:
    """Local steps on this replica, and torchft's outer step every settings["h"] steps, between replicas that its
    lighthouse on the first rank has brought together. host: this one's address. settings: h, outer_lr, outer_momentum;
    bucket_mb: with its buckets, of so many MiB."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, world = task.place.rank, task.place.world
    house = (
        LighthouseServer(bind="0.0.0.0:0", min_replicas=world, join_timeout_ms=60_000) if rank == 0 else None
    )
    where = [f"http://{host}:{house.address().rpartition(':')[2]}" if house is not None else ""]
    dist.broadcast_object_list(where)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=WITHIN), min_replica_size=world, use_async_quorum=False, init_sync=False,
        timeout=WITHIN, quorum_timeout=10 * WITHIN, rank=0, world_size=1, store_addr=host, store_port=store.port,
        lighthouse_addr=where[0], replica_id=f"replica_{rank}", hostname=host, state_dict=dict,
        load_state_dict=lambda state: None,
    )  # fmt: skip
    mb = settings.get("bucket_mb")
    beside = {"use_bucketization": True, "bucket_cap_mb": mb} if mb else {}
    kept: list[Any] = [house, store, manager]

    def updates(whole: nn.Module, train: TrainConfig) -> Any:
        inner = adamw(whole, train)
        momentum = settings["outer_momentum"]
        outer = SGD(whole.parameters(), settings["outer_lr"], momentum, nesterov=momentum > 0.0)
        rounds = DiLoCo(manager, [whole], inner, outer, sync_every=settings["h"], **beside)
        rounds.__enter__()  # hooks of the inner optimiser, for as long as this process runs
        kept.append(rounds)
        return inner

    step = by_hand(task, model, model, lambda last: nullcontext(), updates)

    def counted() -> float:
        assert kept
        return float(step())

    return counted
