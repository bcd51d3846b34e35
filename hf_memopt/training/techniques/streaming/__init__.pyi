from .streamed_layers import stream_layers as stream_layers
