"""Optimisers, one a file, chosen by `train.optimizer`; declared in `spec.training`. `_make` binds one to a rank."""
