"""Share of the rate of matrix products that eigendecompositions reach, in float64 on one core: `EIGEN_RATE` of prices.

python benchmarks/eigen.py --rows 128 256 512 1024
"""

import argparse
import time
from collections.abc import Callable

import torch

from unisono_contrib.train.optim._curved import EIGEN_FLOPS


def quickest(work: Callable[[], object], times: int) -> float:
    """Seconds of the quickest of some calls."""
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return min(took)


def main() -> None:
    reader = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    reader.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512, 1024])
    reader.add_argument("--times", type=int, default=5)
    args = reader.parse_args()
    torch.set_num_threads(1)
    for rows in args.rows:
        x = torch.randn(rows, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        gram = x @ x.T
        product = 2 * rows**3 / quickest(lambda x=x: x @ x, args.times)
        eigen = EIGEN_FLOPS * rows**3 / quickest(lambda gram=gram: torch.linalg.eigh(gram), args.times)
        print(f"{rows:6d} rows  products {product / 1e9:6.1f} GFLOP/s  eigh {eigen / product:.2f} of it")


if __name__ == "__main__":
    main()
