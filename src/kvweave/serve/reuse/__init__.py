"""What is known of a prompt, and the contexts that have it already."""
