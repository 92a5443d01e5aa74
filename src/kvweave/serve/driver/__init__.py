"""The one thread that owns the engine, and whose turn it is."""
