from .exact_losses import ExactLoss as ExactLoss
from .lengths import LENGTH_COLUMN as LENGTH_COLUMN
from .lengths import is_list as is_list
from .lengths import lengths_of as lengths_of
from .lengths import token_count as token_count
from .lengths import token_lengths as token_lengths
