"""Passes of ours over a library's module."""
