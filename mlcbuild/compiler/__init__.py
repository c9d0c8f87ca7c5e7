"""The compiler: the only place that imports TVM, and only in processes of its own."""
