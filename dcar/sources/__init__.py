"""Where files come from: hubs, packages of the registry, and what ships (the only place that
knows asset paths)."""
