"""Backward in two halves: first towards a stage's input, on which other stages wait; later towards its weights.

A graph has joints, where the way to the input passes a node that weights enter too (a matrix product, a norm). The
first half keeps the gradient that arrives at each joint, and the second starts from there, so neither repeats what the
other computes (Qi et al., Zero Bubble Pipeline Parallelism, 2024).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


def backward_in_halves(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> Callable[[], None]:
    """Backward from `outputs` towards `inputs` alone: their gradients are in `.grad` on return.

    The function that is returned computes the gradients of the weights and adds them to `.grad`; it is called once. It
    repeats the way from the outputs for weights that enter at several joints, and for no others.
    """
    if not inputs:  # nothing waits: all of it is towards weights
        return partial(torch.autograd.backward, outputs, grads)
    joints, shared = _joints(outputs, inputs)
    at_joint: dict[Node, tuple[Tensor | None, ...]] = {}
    hooks = [node.register_prehook(partial(at_joint.__setitem__, node)) for node in joints]
    torch.autograd.backward(outputs, grads, inputs=inputs, retain_graph=True)
    for hook in hooks:
        hook.remove()

    def towards_weights() -> None:
        if shared:
            torch.autograd.backward(outputs, grads, inputs=shared, retain_graph=True)
        for node, weights in joints.items():
            here = [(GradientEdge(node, i), g) for i, g in enumerate(at_joint.pop(node, ())) if g is not None]
            if here:
                edges, gradients = zip(*here, strict=True)
                torch.autograd.backward(edges, gradients, inputs=weights)

    return towards_weights


def _joints(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[dict[Node, list[Tensor]], list[Tensor]]:
    """(joint → the weights that enter there alone, the weights that enter at several joints)."""
    targets = {get_gradient_edge(x).node for x in inputs}
    passes: dict[Node, bool] = {}  # whether a way to an input goes through
    weights: dict[
        Node, dict[Tensor, None]
    ] = {}  # beyond a node that none goes through; a set that keeps its order
    enters: dict[Tensor, list[Node]] = {}
    todo = [y.grad_fn for y in outputs if y.grad_fn is not None]
    while todo:  # children first; graphs are deeper than Python's stack
        node = todo[-1]
        children = [child for child, _ in node.next_functions if child is not None]
        unseen = [child for child in children if child not in passes]
        if unseen and node not in passes:
            todo += unseen
            continue
        todo.pop()
        if node in passes:
            continue
        passes[node] = node in targets or any(passes[child] for child in children)
        beside = {weight: None for child in children if not passes[child] for weight in weights[child]}
        if not passes[node]:
            leaf = getattr(node, "variable", None)
            weights[node] = beside if leaf is None else {leaf: None}
        for weight in beside if passes[node] else ():
            enters.setdefault(weight, []).append(node)
    joints: dict[Node, list[Tensor]] = {}
    for weight, nodes in enters.items():
        if len(nodes) == 1:
            joints.setdefault(nodes[0], []).append(weight)
    return joints, [weight for weight, nodes in enters.items() if len(nodes) > 1]
