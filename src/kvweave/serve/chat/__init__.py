"""A chat in neutral terms, for every API that it is asked in: what is asked, read and told."""
