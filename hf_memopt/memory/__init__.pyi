from .estimation import estimate as estimate
from .estimation import own_dtype as own_dtype
from .estimation import precision_for as precision_for
from .estimation import with_hints as with_hints
from .result import Estimate as Estimate
from .training_arguments import estimate_of as estimate_of
from .what_fits import largest_that_fits as largest_that_fits
from .what_fits import margin_of as margin_of
