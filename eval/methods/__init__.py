"""Families of methods: the rows of a comparison that are one line of a plot."""
