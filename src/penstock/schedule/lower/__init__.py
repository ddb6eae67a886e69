"""What is asked for, lowered to a world: every family of schedules. Nothing here imports torch.

``request`` is what is asked, ``families`` the one table of names, and ``build``. All ops are written down by
``emitter``. Two ways lead there:

- *A program whose groups stream between tiers* (``offload``, ``visits``): ``route`` is the order of visits, ``stay``
  what stays on the device between them, ``provision`` the pools that follow from it; ``build``, ``loads``,
  ``activations`` and ``update`` emit the ops around each visit.
- *Layers that stay on the device, whole or in parts* (``ranks``): every rank has a seat, ``layers`` writes down what it
  does there; ``orders`` and ``folded`` say in which order a rank of a pipeline does its work, ``stages`` which layers
  it holds.

May import: ``config``, ``errors``, the rest of ``schedule``.
"""
