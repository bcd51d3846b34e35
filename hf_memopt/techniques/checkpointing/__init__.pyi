from .overlapped import overlap_offload as overlap_offload
from .policies import check_offload as check_offload
