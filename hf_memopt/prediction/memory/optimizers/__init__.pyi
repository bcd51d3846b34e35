from .parameters import OptimizerMemory as OptimizerMemory
from .parameters import ParameterFacts as ParameterFacts
from .state_and_temporaries import check_optimizer as check_optimizer
from .state_and_temporaries import clipping_temporaries as clipping_temporaries
from .state_and_temporaries import optimizer_memory as optimizer_memory
from .state_and_temporaries import parameter_facts as parameter_facts
