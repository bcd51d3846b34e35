from .embedding_bits import EmbeddingBitsCallback as EmbeddingBitsCallback
from .embedding_bits import optimizer_state_bytes as optimizer_state_bytes
from .state_chunks import SMALLEST_BYTES as SMALLEST_BYTES
from .state_chunks import cut_into_chunks as cut_into_chunks
