"""torchft: each rank is a replica group. options: keywords of its Manager, and `ddp` for those of its DDP."""

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unisono_contrib.library.stacks._adapter import StackAdapter
from unisono_contrib.library.stacks._watch import StackWatch


class Torchft(StackAdapter):
    """A quorum, forward and backward, and a step if all replicas commit. place.stack: the Manager."""

    library = extra = "torchft"

    def begin(self) -> None:
        from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
        from torchft._torchft import LighthouseServer  # pyright: ignore[reportMissingImports]

        place, options = self.place, dict(self.place.options)
        self.ddp = options.pop("ddp", {})
        address: list[Any] = [None]
        if place.rank == 0:
            self.house = LighthouseServer(
                bind="127.0.0.1:0", min_replicas=place.world, join_timeout_ms=1000, quorum_tick_ms=20
            )
            address = [self.house.address()]
        dist.broadcast_object_list(address, 0)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place.stack = Manager(**{
            "pg": ProcessGroupGloo(timeout=timedelta(seconds=60)), "min_replica_size": place.world,
            "load_state_dict": None, "state_dict": None, "init_sync": False, "rank": 0, "world_size": 1,
            "store_addr": "127.0.0.1", "store_port": store.port, "lighthouse_addr": address[0],
            "replica_id": f"replica_{place.rank}", "hostname": "127.0.0.1",
        } | options)  # fmt: skip
        self.store = store
        super().begin()

    def wrapped(self) -> Any:
        from torchft import DistributedDataParallel  # pyright: ignore[reportMissingImports]

        return DistributedDataParallel(self.place.stack, self.bare, **self.ddp)

    def run(self, steps: int, watch: StackWatch) -> None:
        try:
            super().run(steps, watch)
            dist.barrier()
        finally:
            self.place.stack.shutdown(wait=False)

    def train(self) -> None:
        place, manager = self.place, self.place.stack
        manager.start_quorum()
        for micro, batch in enumerate(place.batches):
            last = micro == len(place.batches) - 1
            with nullcontext() if last else place.model.no_sync():
                (self.step.loss(place.model, batch) * place.part(micro)).backward()
        if manager.should_commit():
            self.finish()
