"""Compiler passes for a library's module, in addition to those of TVM."""
