"Batches."
from .placement import TfmPlacement
from .loader import XLADL
from .shards import StreamDL, TarShards, TFRecordShards

__all__ = ['XLADL', 'TfmPlacement', 'StreamDL', 'TarShards', 'TFRecordShards']
