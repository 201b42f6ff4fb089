"""The same bits under `tp` and `cp`: a model computed in a fixed number of virtual shards (`sync=canonical:shards=4`).

Widths, heads, vocabulary and positions are dealt as that many virtual shards. Each product has the shape of one of them
and each sum goes along one fixed tree, whoever holds how many (a tree over ranks, for inference: arXiv
2511.17826, 2025). One device computes in them as well.
"""
