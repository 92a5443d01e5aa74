"""The HTTP server: OpenAI's endpoints, the file verbs on chunks, and contexts (extra ``serve``)."""
