from .passes import RecordedPass as RecordedPass
from .passes import StepTrace as StepTrace
from .sessions import Shape as Shape
from .sessions import keeping_models as keeping_models
from .sessions import session as session
from .step import collector_paused as collector_paused
from .streamed import HostWeights as HostWeights
from .trainer_loss import trainer_loss as trainer_loss
