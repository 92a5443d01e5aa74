"""Chunks as objects: identity, cutting, the durable index, and the file verbs on it."""
