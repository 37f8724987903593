"""DCAR: chunk-wise autoregressive text-to-speech with a learned chunk policy."""

__version__ = "0.1.0"
