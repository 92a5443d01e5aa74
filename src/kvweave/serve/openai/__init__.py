"""OpenAI's endpoints: their schemas, a request, its reply."""
