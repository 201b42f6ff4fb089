"""Learning rates over a run, one schedule a file, chosen by `train.lr_schedule`; declared in `spec.training`."""
