from .expandable_segments import platform_problem as platform_problem
from .expandable_segments import use_expandable_segments as use_expandable_segments
from .lanes import Lanes as Lanes
from .precision import PrecisionCallback as PrecisionCallback
from .technique_callback import BoundCallback as BoundCallback
from .technique_callback import ModelCallback as ModelCallback
from .technique_callback import TechniqueCallback as TechniqueCallback
