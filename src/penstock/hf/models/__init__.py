"""Models in and out: a folder's shards stream into a run's store, and out of it into another folder.

    folder   the files of a model: a folder, or a repository of the hub brought into its cache
    shards   safetensors files, read piece by piece
    shell    a model built from its configuration, on the meta device
    mapping  which tensors of the files make which values of the model, by transformers' own rules
    loading  ``load``: a model without memory, and where its values come from
    exporting    ``export``: a trained model as a folder
    adapters     LoRA on its way out: the adapter alone, or merged
    shard_files  safetensors files, written piece by piece
    kept     what a run keeps of its model, so that it can be built and exported without its source

May import what ``hf`` may. The extra ``hf`` installs transformers and what else is needed.
"""
