"""Optimizers whose arithmetic is the same bits everywhere, the gradient norm, and casts.

``formula`` fixes the arithmetic of each optimizer of ``config.optimizer``, ``kernels`` runs it in one pass over memory
(``library`` finds the native code, ``native/`` is its source, ``fused`` is the same on a GPU and ``fallback`` in
torch), ``crossing`` copies between host and device with a cast on the device, ``facade`` is what
``torch.optim.lr_scheduler`` sees. May import: ``errors``, ``native``, ``compat``, ``config``, ``schedule``.
"""
