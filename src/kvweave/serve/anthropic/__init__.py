"""Anthropic's Messages API: its requests, context editing, a reply and its events."""
