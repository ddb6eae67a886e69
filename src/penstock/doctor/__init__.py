"""Measures this machine, for ``penstock doctor``. Its result is a ``hardware.machine.Machine``.

pace.py        runs kinds of work side by side for a while, and says at which rate each went
mounts.py      what a directory is on: kind of file system, disk, NUMA node
work.py        the kinds of work that the engine's lanes do, as small pieces to be run over and over
disk.py        a directory's read, write and simultaneous rates, with the store's own code
device.py      matrix products, copies in the device's memory, to it and back
optimizer.py   parameters per second of every optimizer; gradients to it and weights back, cast on either side
contention.py  how lanes slow each other
overhead.py    what an op costs besides its work, and the host an op of a model
between.py     what ranks send each other, and whether they compute the same bits, in processes of their own
findings.py    what is wrong, in words
examine.py     all of it, in order: the entry

Everything is measured with the code that the engine runs, on buffers of its sizes, so that a profile predicts the
engine and not the hardware's data sheet. May import: ``accelerator``, ``errors``, ``config``, ``schedule``,
``hardware``, ``store``, ``optim``, ``state``, ``ranks``, ``runtime``, ``tape``.
"""
