"""One rank of a suite of collectives that another program has started: `python -m ... NAME FILE`.

NAME: the collective, as a plan writes it. FILE: where ranks meet; none may be there yet. The first rank prints the
sentences of all as a JSON list, the last line of its output.
"""

import json
import sys

import torch
import torch.distributed as dist

from unisono.comm.collectives import COLLECTIVES
from unisono.launch.context import flush_and_leave
from unisono_contrib.verify.conformance.collective import DTYPES, cases, compared, judged

PARTS = (0, 1, 13, 6_000, 70_001)


def main(name: str, file: str) -> None:
    from mpi4py import MPI  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    dist.init_process_group(
        "gloo", store=dist.FileStore(file, world.size), rank=world.rank, world_size=world.size
    )
    pg = dist.new_group(list(range(world.size)), use_local_synchronization=True)
    mine = judged(COLLECTIVES.read(name), pg, cases(PARTS, DTYPES))
    everybody = world.gather(mine)
    if everybody is not None:
        print(json.dumps(compared(everybody)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    flush_and_leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
