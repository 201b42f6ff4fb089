"""Post-training: sequences that a model draws itself, or pairs of answers, as micro-batches of an ordinary run."""
