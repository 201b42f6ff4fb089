"""Flower's own FedAvg as a process that aggregates: for `benchmarks/federated.py --flower PYTHON`.

Run by a Python that has flwr (`pip install flwr`, in an environment of its own). Of Flower it uses what its server does
with a round: parameters of clients, serialised as Flower serialises them, and `FedAvg.aggregate_fit`. Its simulation
engine is not used: that needs ray. Rounds come as arrays on stdin, and go as arrays on stdout.
"""

import struct
import sys

import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAvg

HEAD = struct.Struct("<QQ")


def main() -> None:
    source, target = sys.stdin.buffer, sys.stdout.buffer
    strategy, number = FedAvg(), 0
    while head := source.read(HEAD.size):
        clients, numel = HEAD.unpack(head)
        counts = np.frombuffer(source.read(8 * clients), dtype=np.float64)
        rows = np.frombuffer(source.read(4 * clients * numel), dtype=np.float32).reshape(clients, numel)
        number += 1
        results = [
            (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters([row]), int(count), {}))
            for row, count in zip(rows, counts, strict=True)
        ]
        parameters, _ = strategy.aggregate_fit(number, results, [])
        target.write(parameters_to_ndarrays(parameters)[0].astype(np.float32).tobytes())
        target.flush()


if __name__ == "__main__":
    main()
