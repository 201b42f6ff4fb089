"""What a run says at its start of how the ranks of each axis meet."""

from datetime import timedelta

import torch

from unisono.comm.collectives import COLLECTIVES
from unisono.comm.mesh import Mesh, Shape
from unisono.comm.ways import ways
from unisono.observe.span import Recorder
from unisono_contrib.comm.threads import run


def test_each_axis_of_several_ranks_has_a_line() -> None:
    def said(rank):
        how = COLLECTIVES.read("ring")
        mesh = Mesh(Shape(pp=2, dp=2, tp=2), rank, Recorder(rank), timedelta(seconds=60), collective=how)
        return ways(mesh, torch.device("cpu"), "memory for large messages")

    lines = run(8, said)
    assert lines == [lines[0]] * 8
    dp, tp, pp = lines[0]
    assert dp == "collective: ring, as asked for"
    assert tp.startswith("tp: memory") and "see each other's memory" in tp
    assert pp == "pp: memory for large messages"
