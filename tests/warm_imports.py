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
    "transformers.models.llama.modeling_llama",  # the model of the settings files in the tests
):
    import_module(_name)
gc.freeze()
gc.enable()
