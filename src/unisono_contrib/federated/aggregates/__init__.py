"""Aggregates, one a file: how the deltas of a round's clients become one."""

from unisono_contrib.spec.federated import AGGREGATES, Aggregate

__all__ = ["AGGREGATES", "Aggregate"]
