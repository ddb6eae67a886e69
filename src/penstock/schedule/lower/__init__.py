"""The lowering of a request to a world, for every family of schedules. Nothing here imports torch.

``request`` is what is asked, ``families`` the one table of names, and ``build``. There is one lowering, of a program,
a placement and a mesh to a world: each rank is a walk over its visits (``rank``).

    program     model's stages (tape), or layers of unit costs and a loss (``layers``)
    order       ``visits``: vertical, horizontal; ``orders``, ``folded``: pipelines     -> ``route``, ``stay``
                ``in_turn``: pipelines of ranks that stream; ``messages`` between all of these
    seat        on a ``mesh``: what is cut over which ranks, and when that is combined  -> ``seat``
    placement   the tier of each group's weights and state                              -> ``provision``: the ``pools``
                     |
                     v
    one visit   receive, weights come  |  compute  |  saved activations leave and come  |  what gradients complete, send
                ``activations`` ``loads``                   ``activations``          ``update``, ``device_steps``

All of them write ops down through one ``Builder`` and its ``emitter``. ``offload`` and ``ranks`` make worlds of that:
of ranks that stream the groups of a program, which is what an engine runs, and of ranks that hold layers. They
differ in their pools, which of what streams are known beforehand and of layers are counted (``LayerProvision``), and in
what they can share with other ranks: anything of layers, of what streams all or nothing (``seat``).
``puzzles`` is what only the LLM training puzzles do.

May import: ``config``, ``errors``, the rest of ``schedule``.
"""
