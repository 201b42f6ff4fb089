"""Passes over a model that leave one rank its part, and the player of its pipeline row; `parallelize` orders them.

May import `comm`, `models`, `codecs` and the floors below, and nothing of `sync` or `train`.
"""
