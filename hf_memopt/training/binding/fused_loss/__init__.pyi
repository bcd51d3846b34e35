from .deferred_logits import DeferredLogits as DeferredLogits
from .deferred_logits import loss_alone as loss_alone
from .fuse import FusedHandle as FusedHandle
from .fuse import fuse_cross_entropy as fuse_cross_entropy
