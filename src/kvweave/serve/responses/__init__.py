"""OpenAI's Responses API: items, events, stored responses, conversations, compaction."""
