"""What machines can do: profiles, measured by ``penstock doctor`` or shipped, and where they are kept.

Nothing here imports torch. May import: ``errors``, ``documents``, ``config``, ``schedule``.
"""
