from .presets import PRESETS as PRESETS
from .presets import preset_rows as preset_rows
from .presets import recipe as recipe
from .recipe_class import Recipe as Recipe
from .resolved_arguments import largest_divisor as largest_divisor
from .resolved_arguments import sixteen_bits_here as sixteen_bits_here
from .resolved_arguments import stock_arguments as stock_arguments
