"""What stands between a stranger and the engine."""
