from .caching_allocator import AllocationError as AllocationError
from .caching_allocator import CachingAllocator as CachingAllocator
from .planned_replay import ReplayPlan as ReplayPlan
from .replay import Replayed as Replayed
from .replay import fragmentation_of as fragmentation_of
from .replay import replay_on_gpu as replay_on_gpu
