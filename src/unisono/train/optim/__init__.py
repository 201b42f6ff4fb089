"""Optimisers, one a file, chosen by `train.optimizer`. `spec.training` declares them, `train.update` binds one."""
