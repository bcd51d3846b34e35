from .indices import example_indices as example_indices
