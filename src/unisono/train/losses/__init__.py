"""Losses, one a file, chosen by `train.loss`; declared in `spec.training`."""
