"Batches."
from .loader import TfmPlacement, XLADL
from .shards import StreamDL, TarShards, TFRecordShards

__all__ = ['XLADL', 'TfmPlacement', 'StreamDL', 'TarShards', 'TFRecordShards']
