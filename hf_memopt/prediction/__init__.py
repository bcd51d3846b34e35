"""The prediction wing: what a training needs, told before it runs. It may import the training wing.

A newcomer reads first:

1. ``memory/estimation.py``: one estimate, from a model without weights to the replay of CUDA's allocator;
2. ``recipes/``: presets and ``Recipe``; ``recipes/planning/`` searches for one that fits;
3. ``rehearsal/``: a script as it is, under torch's CUDA code on a GPU that is not there;
4. ``reports/``: the pages and pictures of plans and runs.
"""
