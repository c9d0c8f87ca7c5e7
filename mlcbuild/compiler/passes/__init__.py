"""Passes over a library's module that TVM does not have."""
