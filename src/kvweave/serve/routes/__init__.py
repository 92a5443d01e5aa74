"""Routes of the native endpoints and the page: a file a noun."""
