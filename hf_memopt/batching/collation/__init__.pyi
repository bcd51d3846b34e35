from .collators import BucketedCollator as BucketedCollator
from .collators import check_tokenizer as check_tokenizer
from .columns import round_up as round_up
from .rows import RowBatch as RowBatch
from .rows import RowReader as RowReader
from .speech import SpeechCollator as SpeechCollator
