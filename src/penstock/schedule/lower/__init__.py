"""What is asked for, lowered to a world: every family of schedules. Nothing here imports torch.

``request`` is what is asked, ``families`` the one table of names, and ``build``. ``offload`` lowers a program whose
groups stream between tiers (with the builder beside this room), ``ranks`` layers that stay on the device, whole or in
parts: it seats the ranks, and ``layers`` writes down what each does, through ``recorder``. ``orders`` and ``folded``
say in which order a rank of a pipeline does its work, ``stages`` which layers it holds.
May import: ``config``, ``errors``, the rest of ``schedule``.
"""
