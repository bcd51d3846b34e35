"""What the public functions return or take, for annotations."""

from hf_memopt.changes import Change as Change
from hf_memopt.prediction.memory.settings.step_settings import StepSettings as StepSettings
from hf_memopt.prediction.rehearsal.result import Rehearsal as Rehearsal
from hf_memopt.training.batching.padding_costs.figures import PaddingReport as PaddingReport
from hf_memopt.training.batching.plan.buckets import LengthBuckets as LengthBuckets
from hf_memopt.training.devices.readings.memory_reading import MemoryReading as MemoryReading
from hf_memopt.training.rows.read import Rows as Rows
