"""What this machine can do: kernels, collectives and whole steps, timed on its own ranks."""
