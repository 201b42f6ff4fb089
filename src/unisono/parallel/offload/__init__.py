"""What a rank keeps elsewhere while nobody computes with it (Rajbhandari et al., ZeRO-Infinity, 2021): optimiser state,
weights and activations, in the host's memory or in a file, all through one `Store`.

A copy there and back changes no bit, so every plan is as exact with `offload` as without it.
"""
