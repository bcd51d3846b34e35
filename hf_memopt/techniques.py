"""The functions under the callbacks: each changes a model, or an optimizer, without a ``Trainer``."""

from hf_memopt.training.binding.fused_loss.fuse import fuse_cross_entropy as fuse_cross_entropy
from hf_memopt.training.techniques.checkpointing.policies import checkpoint_layers as checkpoint_layers
from hf_memopt.training.techniques.experts.quantize import quantize_experts as quantize_experts
from hf_memopt.training.techniques.freezing.freezing import freeze as freeze
from hf_memopt.training.techniques.optimizers.embedding_bits import override_embedding_bits as override_embedding_bits
from hf_memopt.training.techniques.optimizers.state_on_host import optimizer_state_on_host as optimizer_state_on_host
from hf_memopt.training.techniques.tied_embedding import sparse_tied_embedding as sparse_tied_embedding
from hf_memopt.training.techniques.tiling.tiles import tile_layers as tile_layers
