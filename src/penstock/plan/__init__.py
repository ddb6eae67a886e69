"""Decides where state lives and how it is cut so that a step fits in the budget. Nothing here imports torch.

``fit`` finds the placement and the buffer depths for a program and a budget. May import: ``config``, ``errors``,
``schedule``.
"""
