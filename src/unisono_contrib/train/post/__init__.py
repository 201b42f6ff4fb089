"""Post-training: sequences that the model has drawn itself, or pairs of answers, as micro-batches of an ordinary run."""
