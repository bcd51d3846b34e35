from .collators import BucketedCollator as BucketedCollator
from .flattened_texts import keep_texts_apart as keep_texts_apart
from .model_needs import has_decoder as has_decoder
from .rows import PackedRow as PackedRow
from .rows import RowReader as RowReader
from .rows import cut_text as cut_text
from .speech import SpeechCollator as SpeechCollator
