"""Data sources, one a file, chosen by `data.source`; declared in `spec.source`. What they share lies beside them."""
