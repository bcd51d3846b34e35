from .freezing import FreezeCallback as FreezeCallback
