"""One file a framework, the same functions in each (arrays.py states them)."""
