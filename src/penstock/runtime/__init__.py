"""Runs a schedule: the executor and its lanes, the buffer pools, what each op does, the serial oracle and the trace.

May import: ``accelerator``, ``errors``, ``compat``, ``config``, ``schedule``, ``tape``, ``ranks``, ``store``,
``optim``, ``state``.
"""
