"""What the bytes of a chunk mean (`layout`), and how they come and go (`transfer`)."""
