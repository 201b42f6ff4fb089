"""Strategies, one a file: what the server makes of a round, and what clients add to their steps."""
