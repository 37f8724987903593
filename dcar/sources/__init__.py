"""Sources of files: hubs, packages of the registry, and shipped assets (the only package that
knows asset paths)."""
