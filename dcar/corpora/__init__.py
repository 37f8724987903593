"""Readers of corpora, one file a family of formats; `dcar.corpus` chooses among them."""
