"""What is asked for, lowered to a world: every family of schedules. Nothing here imports torch.

``request`` is what is asked, ``families`` the one table of names, and ``build``. Three inputs decide what a rank does:
in which order it visits which stages (``visits``, ``orders``, ``folded``), what of weights, gradients and state is cut
over which ranks of a ``mesh`` (``ProcessGroup``, ``Sharding``), and on which tier the rest lives (``Placement``). All
ops are written down by ``emitter``. Two kinds of rank do so:

- *A rank whose groups stream between tiers* (``offload``): ``route`` is the order of visits to a program's stages,
  ``stay`` what stays on the device between them, ``provision`` the pools that follow from it; ``build``, ``loads``,
  ``activations`` and ``update`` emit the ops around each visit. This is what an engine runs.
- *A rank whose layers stay on the device*, whole or in parts (``ranks``): ``layers`` writes down what it does in its
  seat, ``stages`` says which layers it holds.

May import: ``config``, ``errors``, the rest of ``schedule``.
"""
