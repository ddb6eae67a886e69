"""Runs a schedule: the executor and its lanes, the buffer pools, the serial oracle and the trace.

May import: ``config``, ``errors``, ``schedule``, ``plan``, ``store``, ``optim``, ``tape``.
"""
