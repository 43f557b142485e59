"""Anthropic's Messages API, in terms of the chats that the server answers anyway."""
