"""Prediction beside measurement of a step, as a page, a trace and a picture.

``prediction`` and ``trace_file`` read the two sides, ``run_page`` and ``simulated_page`` write the self-contained HTML
page (its script and style are the files under ``page/``), ``chrome`` a Chrome trace, ``picture`` an SVG or a PNG.
Nothing here imports torch. May import: ``errors``, ``files``, ``documents``, ``config``, ``schedule``, ``sim``.
"""
