"""Type of the configurations of all decoders."""

from dcar.model.backbones.decoder import BackboneConfig
from dcar.model.car import CARConfig

DecoderConfig = CARConfig | BackboneConfig
"""Configuration of a decoder or a draft model."""
