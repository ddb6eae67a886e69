"""Every type of model that the installed transformers can train: built tiny, trained by the engine and by plain torch.

``configs`` shrinks configurations, ``inputs`` makes micro-batches, ``trial`` runs one type and ``rounded`` one in bf16,
``__main__`` runs them all and writes the table, ``document`` puts it into docs/architectures.md. ``make sweep`` does
all of it, in fp32.
"""
