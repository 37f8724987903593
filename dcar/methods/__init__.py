"""Decoding methods by name: how they are written, and how they are built from models."""

from dcar.methods.entries import Entry, load_models, make_methods
from dcar.methods.names import MethodSpec, read_methods
from dcar.model.models import Models

__all__ = ["Entry", "MethodSpec", "Models", "load_models", "make_methods", "read_methods"]
