"""`unisono` on one of several ranks; rank 2 stands in the folder `rank2` beside the others', as on a host with a disk of
its own: `python -m tests.verbs.odd_rank train ...`."""

import os
import runpy

if __name__ == "__main__":
    if os.environ["RANK"] == "2":
        os.chdir("../rank2")
        os.environ.update(UNISONO_LAUNCH__BACKEND="nccl") if os.path.exists("nccl") else None
    runpy.run_module("unisono", run_name="__main__", alter_sys=True)
