"""Text in, micro-batches out: where text comes from, the tokenizer that is trained on it, and the order of sequences.

May import: ``config``, ``errors``. Everything a run derives from its text is written into the run's own folder.
"""
