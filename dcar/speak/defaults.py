"""How speech is made where nothing else is said: by `dcar speak`, by `Speaker.load`, and at first on the page of `dcar
demo`. These two are the only place."""

from __future__ import annotations

from dcar.sampling import SamplingConfig

METHOD = "dcar"
SAMPLING = SamplingConfig(temperature=0.4, top_k=10)
