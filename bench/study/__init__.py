"""How a chain of thought uses its KV: tasks of known dependencies, models trained on them, what they read."""
