from .events import blocks_at_peak as blocks_at_peak
from .events import recorded_events as recorded_events
from .phases import peaks_by_phase as peaks_by_phase
from .requirements import RehearsalError as RehearsalError
from .stand_in import StandIn as StandIn
from .stand_in import read_counters as read_counters
from .stand_in import read_generated_calls as read_generated_calls
from .values import values_report as values_report
