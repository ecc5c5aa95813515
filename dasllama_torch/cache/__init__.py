"""What is kept of evaluated tokens: pages of keys and values, handed out to sessions on demand."""
