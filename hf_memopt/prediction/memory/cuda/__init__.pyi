from .attention import TORCH_RELEASE as TORCH_RELEASE
from .flash_attention_2 import use_stand_in as use_stand_in
from .kernel_buffers import hidden_bytes as hidden_bytes
from .kernel_buffers import unknown_operators as unknown_operators
from .kernel_buffers import workspace_bytes as workspace_bytes
from .semantics import CudaSemantics as CudaSemantics
from .semantics import run_backward as run_backward
