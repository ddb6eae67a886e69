"""What a server of processes (``tests.warm``) imports, once: all that the programs of the tests need.

Garbage is not looked for meanwhile, nor among what stays when a process is forked.
"""

import gc
from importlib import import_module

gc.disable()
for _name in (
    *("tests.victims", "torch._dynamo", "penstock.cli.train", "penstock.cli.export"),
    "transformers.models.llama.modeling_llama",  # the model of the settings files in the tests
):
    import_module(_name)
gc.freeze()
gc.enable()
