"""What a server of processes (``tests.warm``) imports, once: all that the programs and the ranks of the tests need.

Garbage is not looked for meanwhile, nor among what stays when a process is forked.
"""

import gc
from importlib import import_module

gc.disable()
for _name in (
    *("tests.victims", "torch._dynamo", "penstock.cli.train", "penstock.cli.export"),
    *("tests.conftest", "tests.ranks.worlds"),  # which files of tests import, whose functions ranks run
    "torch._subclasses.schema_check_mode",  # by the first step of an engine
    # the model of the settings files in the tests, and those of ranks
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "gemma3", "mixtral", "vit")),
    "tests.ranks.test_accelerator",  # and with it most files of tests of ranks
):
    import_module(_name)
gc.freeze()
gc.enable()
