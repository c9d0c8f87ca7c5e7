"""Compiles models to libraries and GPU programs. It is the only package that imports TVM, and only in child
processes.
"""
