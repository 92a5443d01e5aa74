"""The fidelity suite: what reuse costs in answers and in drift, measured on seeded protocols."""
