"""Places of ranks under schedulers that few use. No torch."""
