"""Private names of other libraries, by library: what each stands for, and what breaks without it.

    torch          storages, versions, graph nodes, modes, kernels
    modules        what torch's modules keep, and the hooks on them
    transformers   its loading and saving, and the steps of its Trainer's loop
    accelerate     its wrapper of an optimizer
    peft           the names and the layers of adapters
    trl            the books of its trainers, and the reference of those of preferences
    fabric         the steps of Lightning Fabric's strategies
    python         who listens to warnings
    marks          what transformers, accelerate and peft leave on modules, for rooms that must not import them

A name is private if it begins with an underscore or is in a module that the library does not document; no other room
uses such a name (a test looks). When a library changes one, the file of its name is all that has to change. A public
function or class that uses one, or sets something of a library's, says *Without*, and then what breaks (another test
looks); errors and notes of our own need not. May import: nothing.
"""
