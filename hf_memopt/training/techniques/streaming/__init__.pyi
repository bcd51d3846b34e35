from .lanes import Lanes as Lanes
from .streamed_layers import stream_layers as stream_layers
