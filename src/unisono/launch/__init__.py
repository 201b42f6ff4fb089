"""Starting ranks, watching them, and ending them. Nothing here imports torch except `rank` and `rank_store`."""
