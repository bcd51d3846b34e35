from .frozen_parameters import cast_parameters as cast_parameters
from .frozen_parameters import freeze as freeze
from .frozen_parameters import set_trainable as set_trainable
from .frozen_parameters import trainable_parameters as trainable_parameters
from .layer_names import checked_patterns as checked_patterns
from .layer_names import layer_stacks as layer_stacks
from .layer_names import parameters_outside_adapters as parameters_outside_adapters
from .running_statistics import StillStatistics as StillStatistics
