from .estimation import estimate as estimate
from .estimation import own_dtype as own_dtype
from .result import Estimate as Estimate
from .training_arguments import estimate_of as estimate_of
from .what_fits import largest_that_fits as largest_that_fits
from .what_fits import margin_of as margin_of
