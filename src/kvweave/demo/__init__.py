"""The bundled model's little world, and the demonstration that runs in it."""
