"""Places where the bytes of chunks rest: the contract is `base`, every tier a file."""
