"""Secure aggregation: a server learns the sum of its clients' vectors, and nothing else of them.

Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning" (2017), against a server and
clients that follow the protocol and look at what they get. No transport here: both sides take and return messages.
`secure_sum` plays a round with clients that are anywhere, `SecureParty` is one of them.

    client                              server
    advertise() ──── PublicKeys ──────▶ directory
    share(directory) ── Sealed[] ─────▶ routed by receiver
    mask(sealed, vector) ── Masked ───▶ survivors
    reveal(survivors) ── Revealed ────▶ total

A client may drop out before any arrow. The sum is of those whose `Masked` came, if `threshold` of them also reveal.
"""
