"""Serves mlcbuild bundles. Needs no compiler: only the dependencies in runtime/pyproject.toml."""
