from .requirements import RehearsalError as RehearsalError
from .stand_in import StandIn as StandIn
from .stand_in import read_counters as read_counters
from .stand_in import read_generated_calls as read_generated_calls
from .stand_in import reset_peaks as reset_peaks
