"""The training wing: all that runs inside a ``Trainer``. It knows nothing of the prediction wing.

A newcomer reads first:

1. ``techniques/``: one file or folder for each technique, a function and the callback that calls it;
2. ``batching/``: buckets, packing, samplers, and the collators that pad;
3. ``binding/``: ``attach``, which binds all of it to a Trainer, and how that is undone;
4. ``rows/``: a data set's rows as token ids and labels;
5. ``devices/``: the table of GPUs, and what a GPU says of its memory.
"""
