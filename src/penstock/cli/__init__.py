"""The command line: ``penstock train``. Settings, the run's folder, the display and the training loop around an engine.

May import everything.
"""
