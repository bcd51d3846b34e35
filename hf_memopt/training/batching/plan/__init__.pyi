from .buckets import EpochPlan as EpochPlan
from .buckets import LengthBuckets as LengthBuckets
from .checks import check_batch_limits as check_batch_limits
from .checks import check_integers as check_integers
from .checks import check_settings as check_settings
from .checks import checked_position as checked_position
from .packed_rows import PackedRows as PackedRows
