"""Questions about many prices: what would help, sweeps, batches, failures, slow ranks, exactness, orders and cuts."""
