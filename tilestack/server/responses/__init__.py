"""OpenAI's Responses API, in terms of the chats that the server answers anyway.

A request's items, and those of the stored response that it continues (`store`), become the messages of a chat (`items`,
`conversation`), which is read, limited and answered as any other. What comes back is shaped into items again (`output`),
whole or in events (`answers`).
"""
