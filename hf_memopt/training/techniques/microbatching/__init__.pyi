from .backbones import Backbones as Backbones
from .microbatch import MicrobatchCallback as MicrobatchCallback
from .not_splittable import placeholder_reason as placeholder_reason
from .not_splittable import splittable_batch_reason as splittable_batch_reason
from .not_splittable import splittable_reason as splittable_reason
from .rows_in_parts import Size as Size
from .splitting import row_lengths as row_lengths
