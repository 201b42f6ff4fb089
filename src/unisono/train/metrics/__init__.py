"""What a validation counts beside the loss, a metric a file, chosen by `train.metrics`; see `spec.training`."""
