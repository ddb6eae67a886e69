"""Benchmarks: each module is one command, ``python -m bench.NAME``.

It prints a ratio measured side by side in one run, and keeps it under ``results/`` with the machine and the date.
"""
