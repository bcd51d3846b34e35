from .policies import check_offload as check_offload
