"""Differential privacy: how much a run reveals of any one sample or client, and the noise that limits it.

`mechanism` is one kind of noisy step. `rdp` and `prv` say how much many of them reveal together. `noise` chooses the
noise for a budget. `stream` draws it. `client` protects whole clients of federated rounds.
"""
