"""The layer that people talk to: a conversation as a prompt, and a reply as reasoning, content and tool calls."""
