from .indices import example_indices as example_indices
from .overflow import OverflowCallback as OverflowCallback
