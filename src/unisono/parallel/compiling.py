"""Blocks compiled by torch, each by itself. What ranks say to each other stays as it is, outside of the graphs."""

import torch

from unisono.comm.group import Group
from unisono.parallel.pass_context import PassContext, Stages

# What blocks call of a group while they compute.
SAID = ("all_reduce", "all_gather", "gather_into", "reduce_scatter", "start_exchange", "start_all_gather", "start_send",
        "start_recv")  # fmt: skip


def compile_blocks(stages: Stages, context: PassContext) -> None:
    """Compile every block in place. Tracing breaks where a group is asked: collectives are no part of a graph, since
    other ranks, and what is recorded, depend on when they are called."""
    for group in (context.mesh.tp, context.mesh.cp):
        _outside(group)
    for stage in stages.values():
        for block in stage.blocks.values():
            block.compile()


def _outside(group: Group) -> None:
    for name in SAID:
        setattr(group, name, torch.compiler.disable(getattr(group, name)))
