"""The compiler: the only package that imports TVM, and only in child processes."""
