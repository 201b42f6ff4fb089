"""Text to tokens once: worker processes cut it, and what they wrote lies memory-mapped in a cache.

`order` says what to do, `worker` does it in processes of its own, `build` gives them work, `cache` keeps it. None of
these imports torch; readers of Arrow files and tokenizers are imported by workers alone, for they start threads.
"""
