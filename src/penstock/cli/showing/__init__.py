"""The display of a command at work: a run's figures, drawn on a terminal or written as lines.

``meter`` gathers them; ``screen`` and ``terminal`` draw them, ``display`` writes them as lines.
``yardstick`` is what they are measured against, ``pace`` warns of slow steps, ``summary`` has the first and last words,
``progress`` is for commands that go through many bytes. May import ``config``, ``schedule``, ``plan``, ``report`` and
what the engine tells of a step (``state.stats``); nothing else of ``cli``.
"""
