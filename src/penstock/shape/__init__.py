"""A model as a planner sees it: its program for one shape of micro-batch, and the arithmetic of each stage.

    model                 the types
    meta                  runs a module on the meta device and reads both off it
    transformer           four architectures by formula
    decoders              their numbers, from configurations of Hugging Face's
    huggingface, shipped  configurations of Hugging Face's models; those that ship by name

Nothing here imports torch at module level. May import: ``errors``, ``documents``, ``config``, ``schedule``,
``hardware``, ``loss``, ``tape``.
"""
