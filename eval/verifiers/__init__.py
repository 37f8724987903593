"""Decoding methods that verify drafts or choose among the heads' proposals. None needs training.

Each module is a paper: its rule, its settings, its name and its line in a plot. All are methods of
the one step (`dcar.decoding.decode`), so prompts, sampling, cache and clock are the same for all.
A verifier of your own extends `chain.ChainVerifier`.

Every module of this package is imported here: a new one needs no entry.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
