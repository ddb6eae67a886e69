"""An accelerator for tests: PyTorch's device ``sim``, which is simulated on the CPU, and hostile.

    device/         the backend, in C++: memory, streams, clocks, kernels
    build.py        compiles it when it is first needed, and keeps what it made by its content
    simulated.py    makes it a device of PyTorch's and of the engine's
    watching.py     tells its clocks what orders host threads, and what these touch
    elsewhere.py    runs the tests that are marked ``accelerator`` in a process that has it; on a GPU where there is one

What it does as a GPU does, and worse:

- Its memory cannot be touched by the host: that is a segmentation fault. There is a limit to it, and an allocator that
  hands freed memory out again at once in the order of its stream, and for other streams only what ``record_stream``
  says. Freed memory is overwritten with NaN.
- Ops are queued. They run when somebody waits for them and not before; with ``patience``, also at random moments, in
  any order that streams and events allow. Numbers come from the CPU's kernels, so bits can be compared.
- It copies asynchronously from and to page-locked memory alone, and knows which is.
- Its random numbers are its own.
- Clocks of every stream and host thread find each pair of accesses which nothing orders, whatever the timing was, and
  name both, with the place in the code of the later one. Memory that is handed out is written on its own stream then,
  be it fresh or long idle. A test that is marked ``accelerator`` fails if there is such a pair.

A process has it from its start or not at all: autograd makes its threads once.
"""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "sim"
"""What tests that are marked ``accelerator`` compute on."""
