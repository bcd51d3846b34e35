from .waiting import before_first_use as before_first_use
from .waiting import calling_trainer as calling_trainer
from .waiting import stop_waiting as stop_waiting
