"""Where what a step did is written to: one sink a file. See `spec.sink`."""
