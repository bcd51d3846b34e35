"""The GPUs that memory and time are predicted for: the table, and one by name or by its memory."""

from hf_memopt.training.devices.gpus import GPUS as GPUS
from hf_memopt.training.devices.gpus import Gpu as Gpu
from hf_memopt.training.devices.gpus import custom_gpu as custom_gpu
from hf_memopt.training.devices.gpus import find_gpu as find_gpu
