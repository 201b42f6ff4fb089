"""Optimisers, one a file, chosen by `train.optimizer`. `spec.training` declares them, `train.step.update` binds one."""
